/* Four threads that send and four that receive on each side, on few cores, beside busy loops. Messages are neither lost nor
 * sent twice, the kernel ends what hangs, and no thread starves: the share of the least is compared with an equal one. */
#include "check.h"

#include <time.h>

#define THREADS 4
/* Of an equal share, in a long run. */
#define LEAST_PERCENT 1

static nv_ipc_t *ipc;
/* Guarded by nothing: every thread has its own. */
static long counts[2 * THREADS];
static int senders_left = THREADS, is_peer_done, is_over;
static struct timespec deadline;

static int is_late(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec > deadline.tv_sec || (now.tv_sec == deadline.tv_sec && now.tv_nsec >= deadline.tv_nsec);
}

static void *busy(void *unused)
{
    (void)unused;
    while (!__atomic_load_n(&is_over, __ATOMIC_RELAXED)) {}
    return NULL;
}

static void *sends(void *number)
{
    int own = *(int *)number;
    while (!is_late())
        /* Retries in a loop without yielding, as NVIPC's programs do. */
        if (sent(ipc, own, 0, (unsigned char)own) == 0)
            counts[own]++;
    /* The last thread says how many there were, after all of them. */
    if (__atomic_sub_fetch(&senders_left, 1, __ATOMIC_ACQ_REL) == 0) {
        long all = counts[0] + counts[1] + counts[2] + counts[3];
        while (sent(ipc, 1000 + (int)all, 0, 0) != 0) {}
    }
    return NULL;
}

static long expected = -1, received_all;

static void *receives(void *number)
{
    int own = *(int *)number;
    nv_ipc_msg_t msg;
    while (!__atomic_load_n(&is_peer_done, __ATOMIC_ACQUIRE)) {
        if (ipc->rx_recv_msg(ipc, &msg) == 0) {
            if (msg.msg_id >= 1000) {
                __atomic_store_n(&expected, msg.msg_id - 1000, __ATOMIC_RELEASE);
            } else {
                CHECK(msg.msg_id < THREADS && *(unsigned char *)msg.msg_buf == msg.msg_id);
                counts[own]++;
                __atomic_fetch_add(&received_all, 1, __ATOMIC_ACQ_REL);
            }
            CHECK(ipc->rx_release(ipc, &msg) == 0);
        }
        if (__atomic_load_n(&expected, __ATOMIC_ACQUIRE) == __atomic_load_n(&received_all, __ATOMIC_ACQUIRE))
            __atomic_store_n(&is_peer_done, 1, __ATOMIC_RELEASE);
    }
    return NULL;
}

/* The share of the least of four threads, in percent of an equal share. */
static long fairness(const char *side, const char *what, const long *of)
{
    long least = of[0], sum = 0;
    for (int i = 0; i < THREADS; i++) {
        least = of[i] < least ? of[i] : least;
        sum += of[i];
    }
    CHECK(sum > 0);
    printf("%s: %s %ld messages, the least of four threads %ld %% of an equal share\n", side, what, sum,
           least * THREADS * 100 / sum);
    return least * THREADS * 100 / sum;
}

static void side(nv_ipc_module_t module, long run_ms)
{
    ipc = opened("stress", module);
    clock_gettime(CLOCK_MONOTONIC, &deadline);
    deadline.tv_sec += run_ms / 1000;
    deadline.tv_nsec += run_ms % 1000 * 1000000;
    if (deadline.tv_nsec >= 1000000000) {
        deadline.tv_sec++;
        deadline.tv_nsec -= 1000000000;
    }
    pthread_t threads[3 * THREADS];
    int numbers[2 * THREADS];
    for (int i = 0; i < 2 * THREADS; i++) {
        numbers[i] = i;
        CHECK(pthread_create(&threads[i], NULL, i < THREADS ? sends : receives, &numbers[i]) == 0);
    }
    int is_long = run_ms >= 5000, loops = is_long ? THREADS : 1;
    for (int i = 0; i < loops; i++)
        CHECK(pthread_create(&threads[2 * THREADS + i], NULL, busy, NULL) == 0);
    for (int i = 0; i < 2 * THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    __atomic_store_n(&is_over, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < loops; i++)
        CHECK(pthread_join(threads[2 * THREADS + i], NULL) == 0);
    const char *name = is_module_primary(module) ? "primary" : "secondary";
    long sent_share = fairness(name, "sent", counts), received_share = fairness(name, "received", counts + THREADS);
    /* In a short run each thread has only some time slices, in which another may have taken all buffers. */
    CHECK(!is_long || (sent_share >= LEAST_PERCENT && received_share >= LEAST_PERCENT));
    CHECK(ipc->ipc_destroy(ipc) == 0);
}

/* stress MILLISECONDS [secondary] */
int main(int argc, char **argv)
{
    begin();
    CHECK(argc > 1);
    if (argc > 2) {
        side(NV_IPC_MODULE_SECONDARY, atol(argv[2]));
        return 0;
    }
    pid_t child = start_again("secondary", argv[1], NULL);
    side(NV_IPC_MODULE_PRIMARY, atol(argv[1]));
    succeeds(child);
    return 0;
}
