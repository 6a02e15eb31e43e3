/* Four threads that send and four that receive on each side, on few cores, with a busy loop for each core. All messages
 * arrive, and every thread gets its share of the time. */
#include "check.h"

#define THREADS 4
#define MESSAGES 5000

static nv_ipc_t *ipc;
static int expected;
static int received_all;
static int counts[2 * THREADS];

static void *busy(void *unused)
{
    (void)unused;
    while (__atomic_load_n(&received_all, __ATOMIC_RELAXED) < expected) {}
    return NULL;
}

static void *sends(void *number)
{
    int own = *(int *)number;
    for (int i = 0; i < MESSAGES; i++) {
        /* Retries in a loop without yielding, as NVIPC's programs do. */
        while (sent(ipc, own, 0, (unsigned char)own) != 0) {}
        counts[own]++;
    }
    return NULL;
}

static void *receives(void *number)
{
    int own = *(int *)number;
    nv_ipc_msg_t msg;
    while (__atomic_load_n(&received_all, __ATOMIC_RELAXED) < expected) {
        if (ipc->rx_recv_msg(ipc, &msg) != 0)
            continue;
        CHECK(msg.msg_id < THREADS && *(unsigned char *)msg.msg_buf == msg.msg_id && ipc->rx_release(ipc, &msg) == 0);
        counts[own]++;
        __atomic_fetch_add(&received_all, 1, __ATOMIC_RELAXED);
    }
    return NULL;
}

static void side(nv_ipc_module_t module)
{
    ipc = opened("stress", module);
    expected = THREADS * MESSAGES;
    pthread_t threads[3 * THREADS];
    int numbers[2 * THREADS];
    for (int i = 0; i < 2 * THREADS; i++) {
        numbers[i] = i;
        CHECK(pthread_create(&threads[i], NULL, i < THREADS ? sends : receives, &numbers[i]) == 0);
    }
    for (int i = 2 * THREADS; i < 3 * THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, busy, NULL) == 0);
    for (int i = 0; i < 3 * THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    int least = expected, most = 0;
    for (int i = THREADS; i < 2 * THREADS; i++) {
        least = counts[i] < least ? counts[i] : least;
        most = counts[i] > most ? counts[i] : most;
    }
    printf("%s: receivers took %d to %d of %d messages each\n", is_module_primary(module) ? "primary" : "secondary", least,
           most, expected);
    CHECK(received_all == expected && least > 0);
    CHECK(ipc->ipc_destroy(ipc) == 0);
}

int main(int argc, char **argv)
{
    (void)argv;
    begin();
    if (argc > 1) {
        side(NV_IPC_MODULE_SECONDARY);
        return 0;
    }
    pid_t child = start_again("secondary", NULL, NULL);
    side(NV_IPC_MODULE_PRIMARY);
    succeeds(child);
    return 0;
}
