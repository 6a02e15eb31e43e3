/* Any thread may call any function of an endpoint: two send, two receive, and one releases what those received. */

#include "check.h"

#include <dirent.h>

#define SENDERS 2
#define RECEIVERS 2
#define EACH 2000
#define ALL (SENDERS * EACH)

static nv_ipc_t *phy, *mac;
static unsigned char seen[ALL];
static int turns;

/* Messages from the receiving threads to the releasing thread. */
static struct {
    pthread_mutex_t lock;
    nv_ipc_msg_t msg[16];
    int count;
} handed = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void *sender(void *number)
{
    for (int i = 0; i < EACH; i++) {
        nv_ipc_msg_t msg;
        memset(&msg, 0, sizeof(msg));
        msg.data_pool = i % 2 ? NV_IPC_MEMPOOL_CPU_DATA : -1;
        /* The pool is empty until the other threads have released something. */
        while (mac->tx_allocate(mac, &msg, 0) != 0)
            sched_yield();
        int value = (int)(intptr_t)number * EACH + i;
        memcpy(msg.msg_buf, &value, sizeof(value));
        msg.msg_len = sizeof(value);
        msg.data_len = msg.data_buf != NULL ? 64 : 0;
        if (msg.data_buf != NULL)
            memset(msg.data_buf, value, 64);
        msg.msg_id = value;
        CHECK(mac->tx_send_msg(mac, &msg) == 0);
        posted(mac);
    }
    return NULL;
}

static void *receiver(void *arg)
{
    (void)arg;
    while (__atomic_fetch_add(&turns, 1, __ATOMIC_RELAXED) < ALL) {
        nv_ipc_msg_t msg;
        /* There are as many posts as messages: after each post there is a message. */
        CHECK(phy->rx_tti_sem_wait(phy) == 0);
        received(phy, &msg);
        int value;
        memcpy(&value, msg.msg_buf, sizeof(value));
        CHECK(value == msg.msg_id && value >= 0 && value < ALL);
        CHECK(__atomic_exchange_n(&seen[value], 1, __ATOMIC_RELAXED) == 0);
        CHECK((msg.data_buf != NULL) == (value % 2 == 1));
        for (int i = 0; i < msg.data_len; i++)
            CHECK(((unsigned char *)msg.data_buf)[i] == (unsigned char)value);
        for (int put = 0; !put;) {
            pthread_mutex_lock(&handed.lock);
            if (handed.count < 16) {
                handed.msg[handed.count++] = msg;
                put = 1;
            }
            pthread_mutex_unlock(&handed.lock);
            if (!put)
                sched_yield();
        }
    }
    return NULL;
}

static void *releaser(void *arg)
{
    (void)arg;
    for (int released = 0; released < ALL;) {
        nv_ipc_msg_t msg;
        pthread_mutex_lock(&handed.lock);
        int got = handed.count > 0;
        if (got)
            msg = handed.msg[--handed.count];
        pthread_mutex_unlock(&handed.lock);
        if (got) {
            CHECK(phy->rx_release(phy, &msg) == 0);
            released++;
        } else {
            sched_yield();
        }
    }
    return NULL;
}

static int waiting;

static void *waiter(void *wait)
{
    __atomic_fetch_add(&waiting, 1, __ATOMIC_RELEASE);
    /* No post arrives. The wait fails when the instance is destroyed. */
    CHECK((wait ? phy->rx_tti_sem_wait(phy) : phy->get_value(phy)) == -1);
    return NULL;
}

static __attribute__((noinline)) void work(void)
{
    /* A call that fails with a log line. Calls complete what they have begun. */
    CHECK(phy->tx_send_msg(phy, NULL) == -1 && sent(phy, 1, 0, 1) == 0 && phy->tx_tti_sem_post(phy) == 0);
    nv_ipc_msg_t msg;
    received(mac, &msg);
    CHECK(mac->rx_release(mac, &msg) == 0);
}

/*
 * Waits in one of several ways, or works, until it is cancelled. It has no variables on its own stack frame: the address
 * sanitizer does not see that it ends.
 */
static void *cancelled(void *way)
{
    __atomic_fetch_add(&waiting, 1, __ATOMIC_RELEASE);
    for (;;) {
        switch ((intptr_t)way) {
        case 0: CHECK(phy->rx_tti_sem_wait(phy) == 0); break;
        case 1: CHECK(phy->get_value(phy) == 1); break;
        case 2: CHECK(nvipc_fw_sem_wait(phy) == 0); break;
        case 3: CHECK(nvipc_fw_sem_timedwait(phy, NULL) == 0); break;
        default: work(); pthread_testcancel();
        }
    }
}

static int waiting_thread;

static void *idle(void *way)
{
    __atomic_store_n(&waiting_thread, (int)syscall(SYS_gettid), __ATOMIC_RELEASE);
    for (;;)
        CHECK((way ? phy->get_value(phy) : phy->rx_tti_sem_wait(phy)) == -1);
}

/* How often a thread of this process has gone to sleep. */
static long sleeps_of(int thread)
{
    char line[256];
    long sleeps = -1;
    snprintf(line, sizeof(line), "/proc/self/task/%d/status", thread);
    FILE *status = fopen(line, "r");
    CHECK(status != NULL);
    while (fgets(line, sizeof(line), status) != NULL)
        sscanf(line, "voluntary_ctxt_switches: %ld", &sleeps);
    CHECK(fclose(status) == 0 && sleeps >= 0);
    return sleeps;
}

/* A waiting thread does not wake up by itself, and can be cancelled nevertheless. One that looks twice a second is seen. */
static void idle_threads(void)
{
    for (intptr_t way = 0; way < 2; way++) {
        pthread_t thread;
        void *ended;
        int number;
        __atomic_store_n(&waiting_thread, 0, __ATOMIC_RELEASE);
        CHECK(pthread_create(&thread, NULL, idle, (void *)way) == 0);
        while ((number = __atomic_load_n(&waiting_thread, __ATOMIC_ACQUIRE)) == 0)
            sched_yield();
        /* In the first seconds it may not be asleep yet. */
        int quiet = 0;
        for (int look = 0; look < 100 && quiet < 4; look++) {
            long before = sleeps_of(number);
            usleep(200000);
            quiet = before > 0 && sleeps_of(number) == before ? quiet + 1 : 0;
        }
        CHECK(quiet == 4);
        CHECK(pthread_cancel(thread) == 0 && pthread_join(thread, &ended) == 0 && ended == PTHREAD_CANCELED);
    }
}

static nv_ipc_t *own;

static void destroy(void *arg)
{
    (void)arg;
    CHECK(own->ipc_destroy(own) == 0);
}

static void *owner(void *arg)
{
    (void)arg;
    pthread_cleanup_push(destroy, NULL);
    __atomic_store_n(&waiting, 1, __ATOMIC_RELEASE);
    for (;;)
        CHECK(own->rx_tti_sem_wait(own) == 0);
    pthread_cleanup_pop(1);
    return NULL;
}

/* A cleanup handler of a thread that is cancelled in a wait destroys the instance that it waited on. */
static void cancel_owner(void)
{
    pthread_t thread;
    void *ended;
    own = opened("owner", NV_IPC_MODULE_PRIMARY);
    CHECK(pthread_create(&thread, NULL, owner, NULL) == 0);
    while (__atomic_load_n(&waiting, __ATOMIC_ACQUIRE) < 1)
        sched_yield();
    CHECK(pthread_cancel(thread) == 0 && pthread_join(thread, &ended) == 0 && ended == PTHREAD_CANCELED);
    __atomic_store_n(&waiting, 0, __ATOMIC_RELEASE);
}

static void cancel_threads(void)
{
    for (intptr_t turn = 0; turn < 25; turn++) {
        pthread_t thread;
        void *ended;
        __atomic_store_n(&waiting, 0, __ATOMIC_RELEASE);
        CHECK(pthread_create(&thread, NULL, cancelled, (void *)(turn % 5)) == 0);
        while (__atomic_load_n(&waiting, __ATOMIC_ACQUIRE) < 1)
            sched_yield();
        CHECK(pthread_cancel(thread) == 0 && pthread_join(thread, &ended) == 0 && ended == PTHREAD_CANCELED);
    }
    /* Other threads continue. */
    posted(mac);
    CHECK(phy->rx_tti_sem_wait(phy) == 0 && sent(phy, 1, 0, 1) == 0);
    nv_ipc_msg_t msg;
    received(mac, &msg);
    CHECK(mac->rx_release(mac, &msg) == 0);
    __atomic_store_n(&waiting, 0, __ATOMIC_RELEASE);
}

#define CALLERS 2
static nv_ipc_t *current;
static int round_of_calls, callers_paused;

/* Calls whatever instance there is, also while it is destroyed: each call is made or refused. */
static void *calls_on(void *unused)
{
    (void)unused;
    for (int paused = 0, now = 0; now >= 0;) {
        nv_ipc_t *ipc = __atomic_load_n(&current, __ATOMIC_ACQUIRE);
        nv_ipc_msg_t msg = {.data_pool = -1, .msg_len = 1};
        if (ipc->tx_allocate(ipc, &msg, 0) == 0 && nv_ipc_shm_send_loopback(ipc, &msg) != 0)
            ipc->tx_release(ipc, &msg);
        if (ipc->rx_recv_msg(ipc, &msg) == 0)
            ipc->rx_release(ipc, &msg);
        now = __atomic_load_n(&round_of_calls, __ATOMIC_ACQUIRE);
        /* In odd rounds all pause. */
        if (now > paused && now % 2 == 1) {
            paused = now;
            __atomic_fetch_add(&callers_paused, 1, __ATOMIC_ACQ_REL);
            while (__atomic_load_n(&round_of_calls, __ATOMIC_ACQUIRE) == now)
                sched_yield();
        }
    }
    return NULL;
}

static int descriptors(void)
{
    DIR *open_ones = opendir("/proc/self/fd");
    int count = 0;
    CHECK(open_ones != NULL);
    while (readdir(open_ones) != NULL)
        count++;
    closedir(open_ones);
    return count;
}

static int is_mapped(const char *name)
{
    char line[4096];
    FILE *maps = fopen("/proc/self/maps", "re");
    int found = 0;
    CHECK(maps != NULL);
    while (fgets(line, sizeof(line), maps) != NULL)
        found |= strstr(line, name) != NULL;
    fclose(maps);
    return found;
}

/* Instances are destroyed beside calls of threads that live on, and their memory is given back at once. */
static void destroy_beside_calls(void)
{
    pthread_t threads[CALLERS];
    const char *layout = getenv("SHMESH_NVIPC_LAYOUT");
    int before = descriptors(), is_nvipc = layout != NULL && strcmp(layout, "nvipc") == 0;
    current = opened("beside", NV_IPC_MODULE_PRIMARY);
    for (int i = 0; i < CALLERS; i++)
        CHECK(pthread_create(&threads[i], NULL, calls_on, NULL) == 0);
    for (int i = 1; i <= 12; i++) {
        usleep(2000);
        nv_ipc_t *ipc = current;
        CHECK(ipc->ipc_destroy(ipc) == 0);
        nv_ipc_msg_t msg = {.data_pool = -1};
        CHECK(ipc->tx_allocate(ipc, &msg, 0) == -1 && ipc->rx_recv_msg(ipc, &msg) == -1);
        __atomic_store_n(&round_of_calls, 2 * i - 1, __ATOMIC_RELEASE);
        while (__atomic_load_n(&callers_paused, __ATOMIC_ACQUIRE) < CALLERS * i)
            sched_yield();
        CHECK(!is_mapped("beside_"));
        /* A thread of the library ends a moment later. In NVIPC's layout the callers keep some eventfds until their next call. */
        while (!is_nvipc && descriptors() > before)
            usleep(1000);
        if (i < 12)
            __atomic_store_n(&current, opened("beside", NV_IPC_MODULE_PRIMARY), __ATOMIC_RELEASE);
        __atomic_store_n(&round_of_calls, i < 12 ? 2 * i : -1, __ATOMIC_RELEASE);
    }
    for (int i = 0; i < CALLERS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
}

int main(void)
{
    begin();
    destroy_beside_calls();
    phy = opened("threads", NV_IPC_MODULE_PRIMARY);
    mac = opened("threads", NV_IPC_MODULE_SECONDARY);
    pthread_t threads[SENDERS + RECEIVERS + 1];
    int n = 0;
    for (intptr_t i = 0; i < SENDERS; i++)
        CHECK(pthread_create(&threads[n++], NULL, sender, (void *)i) == 0);
    for (int i = 0; i < RECEIVERS; i++)
        CHECK(pthread_create(&threads[n++], NULL, receiver, NULL) == 0);
    CHECK(pthread_create(&threads[n++], NULL, releaser, NULL) == 0);
    while (n > 0)
        CHECK(pthread_join(threads[--n], NULL) == 0);
    for (int i = 0; i < ALL; i++)
        CHECK(seen[i] == 1);

    cancel_threads();
    idle_threads();
    cancel_owner();

    /* Destroyed while other threads wait. */
    for (intptr_t i = 0; i < 2; i++)
        CHECK(pthread_create(&threads[n++], NULL, waiter, (void *)i) == 0);
    while (__atomic_load_n(&waiting, __ATOMIC_ACQUIRE) < 2)
        sched_yield();
    CHECK(phy->ipc_destroy(phy) == 0);
    while (n > 0)
        CHECK(pthread_join(threads[--n], NULL) == 0);
    CHECK(mac->ipc_destroy(mac) == 0);
    return 0;
}
