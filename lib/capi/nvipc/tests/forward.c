/* The tap: what an instance sends and receives, for a third reader. Over either layout. */
#include "check.h"

/* A third of the buffers of each pool of small(). */
#define ROOM 5
#define ROOM_DATA 2

static void forwarded(nv_ipc_t *ipc, nv_ipc_msg_t *msg, int32_t id, int32_t pool, unsigned char byte)
{
    CHECK(nvipc_fw_dequeue(ipc, msg) == 0);
    CHECK(msg->msg_id == id && msg->cell_id == id + 1 && msg->msg_len == 1 && msg->data_pool == pool);
    CHECK(*(unsigned char *)msg->msg_buf == byte && (msg->data_buf != NULL) == (pool != 0));
    CHECK(msg->data_len == (pool != 0) && (pool == 0 || *(unsigned char *)msg->data_buf == byte));
}

static void taken(nv_ipc_t *ipc, int32_t id)
{
    nv_ipc_msg_t msg;
    CHECK(ipc->rx_recv_msg(ipc, &msg) == 0 && msg.msg_id == id && ipc->rx_release(ipc, &msg) == 0);
}

static void empty(nv_ipc_t *ipc)
{
    nv_ipc_msg_t none;
    struct timespec now;
    CHECK(clock_gettime(CLOCK_REALTIME, &now) == 0);
    CHECK(nvipc_fw_dequeue(ipc, &none) == -1);
    errno = 0;
    CHECK(nvipc_fw_sem_timedwait(ipc, &now) == -1 && errno == ETIMEDOUT);
}

/* Both directions, every pool, in order. Messages in the tap do not change when the link reuses its buffers. */
static void both_ways(nv_ipc_t *phy, nv_ipc_t *mac)
{
    static const int32_t pools[] = {0, NV_IPC_MEMPOOL_CPU_DATA, NV_IPC_MEMPOOL_CPU_LARGE};
    nv_ipc_msg_t msg[3], copy;
    CHECK(sent(phy, 1, 0, 1) == 0);
    taken(mac, 1);
    empty(phy);
    CHECK(nvipc_fw_get_started(phy) == 0 && nvipc_fw_start(phy, 0) == 0 && nvipc_fw_get_started(phy) == 1);
    CHECK(nvipc_fw_start(phy, 0) == -1 && nvipc_fw_get_started(mac) == 0);
    for (int round = 0; round < 2; round++) {
        nv_ipc_t *from = round == 0 ? phy : mac, *to = round == 0 ? mac : phy;
        for (int i = 0; i < 3; i++) {
            CHECK(sent(from, i, pools[i], (unsigned char)(100 + i)) == 0);
            taken(to, i);
        }
        for (int i = 0; i < 3; i++) {
            CHECK(nvipc_fw_sem_wait(phy) == 0);
            forwarded(phy, &msg[i], i, pools[i], (unsigned char)(100 + i));
        }
        empty(phy);
        /* Overwrite every buffer of the link. The tap is stopped, so these messages are not forwarded. */
        CHECK(nvipc_fw_stop(phy) == 0);
        for (int i = 0; i < 40; i++) {
            CHECK(sent(from, i, pools[i % 3], 7) == 0);
            taken(to, i);
        }
        CHECK(nvipc_fw_start(phy, 0) == 0);
        for (int i = 0; i < 3; i++) {
            CHECK(*(unsigned char *)msg[i].msg_buf == 100 + i && (i == 0 || *(unsigned char *)msg[i].data_buf == 100 + i));
            /* Messages of the tap do not belong to the link. */
            CHECK(phy->rx_release(phy, &msg[i]) == -1 && phy->tx_send_msg(phy, &msg[i]) == -1);
            copy = msg[i];
            CHECK(nvipc_fw_free(mac, &copy) == -1);
            CHECK(nvipc_fw_free(phy, &copy) == 0 && nvipc_fw_free(phy, &copy) == -1);
        }
    }
    /* Messages whose send fails are not forwarded. */
    memset(&copy, 0, sizeof(copy));
    CHECK(phy->tx_allocate(phy, &copy, 0) == 0);
    copy.msg_len = 513;
    CHECK(phy->tx_send_msg(phy, &copy) == -1 && phy->tx_release(phy, &copy) == 0);
    copy.msg_len = 1;
    CHECK(phy->tx_send_msg(phy, &copy) == -1 && nvipc_fw_enqueue(phy, &copy) == -1);
    copy.msg_buf = &copy;
    CHECK(phy->tx_send_msg(phy, &copy) == -1 && nvipc_fw_enqueue(phy, &copy) == -1 && nvipc_fw_free(phy, &copy) == -1);
    empty(phy);
    /* A message may be put into the tap without being sent. */
    memset(&copy, 0, sizeof(copy));
    copy.data_pool = NV_IPC_MEMPOOL_CPU_DATA;
    CHECK(phy->tx_allocate(phy, &copy, 0) == 0);
    copy.msg_id = 4;
    copy.cell_id = 5;
    copy.msg_len = copy.data_len = 1;
    *(unsigned char *)copy.msg_buf = *(unsigned char *)copy.data_buf = 9;
    CHECK(nvipc_fw_enqueue(phy, &copy) == 0 && phy->tx_release(phy, &copy) == 0);
    forwarded(phy, &msg[0], 4, NV_IPC_MEMPOOL_CPU_DATA, 9);
    CHECK(nvipc_fw_free(phy, &msg[0]) == 0);
    CHECK(nvipc_fw_reset(phy) == 0 && nvipc_fw_get_started(phy) == 0 && nvipc_fw_enqueue(phy, &copy) == -1);
}

/* Stops after a number of messages. Messages in the tap stay there. */
static void so_many(nv_ipc_t *phy, nv_ipc_t *mac)
{
    nv_ipc_msg_t msg;
    CHECK(nvipc_fw_start(mac, 3) == 0);
    for (int i = 0; i < 8; i++) {
        CHECK(nvipc_fw_get_started(mac) == (i < 3));
        CHECK(sent(phy, i, 0, 5) == 0);
        taken(mac, i);
    }
    for (int i = 0; i < 3; i++) {
        forwarded(mac, &msg, i, 0, 5);
        CHECK(nvipc_fw_free(mac, &msg) == 0);
    }
    empty(mac);
    CHECK(nvipc_fw_get_lost(mac) == 0);
}

/* A reader that never reads delays no sender, and finds the messages for which there was room. */
static void stuck(nv_ipc_t *phy, nv_ipc_t *mac)
{
    nv_ipc_msg_t msg[ROOM];
    CHECK(nvipc_fw_start(phy, 0) == 0);
    for (int i = 0; i < 1000; i++) {
        CHECK(sent(phy, i, 0, 1) == 0);
        taken(mac, i);
    }
    CHECK(nvipc_fw_get_lost(phy) == 1000 - ROOM);
    for (int i = 0; i < ROOM; i++)
        forwarded(phy, &msg[i], i, 0, 1);
    /* Messages that were read and not freed still take room. */
    CHECK(sent(phy, 7, 0, 1) == 0);
    taken(mac, 7);
    CHECK(nvipc_fw_get_lost(phy) == 1001 - ROOM);
    CHECK(nvipc_fw_free(phy, &msg[2]) == 0 && sent(phy, 8, 0, 3) == 0);
    taken(mac, 8);
    forwarded(phy, &msg[2], 8, 0, 3);
    for (int i = 0; i < ROOM; i++)
        CHECK(nvipc_fw_free(phy, &msg[i]) == 0);
    CHECK(nvipc_fw_reset(phy) == 0 && nvipc_fw_get_lost(phy) == 0 && nvipc_fw_start(phy, 0) == 0);
    /* The same for the room for DATA; messages without DATA still pass. */
    for (int i = 0; i < 4; i++) {
        CHECK(sent(mac, i, NV_IPC_MEMPOOL_CPU_DATA, 1) == 0);
        taken(phy, i);
    }
    CHECK(nvipc_fw_get_lost(phy) == 4 - ROOM_DATA);
    CHECK(sent(mac, 4, 0, 1) == 0);
    taken(phy, 4);
    CHECK(nvipc_fw_get_lost(phy) == 4 - ROOM_DATA);
    for (int i = 0; i < ROOM_DATA + 1; i++)
        CHECK(nvipc_fw_dequeue(phy, &msg[0]) == 0 && nvipc_fw_free(phy, &msg[0]) == 0);
    empty(phy);
    CHECK(nvipc_fw_reset(phy) == 0);
}

static void filters(nv_ipc_t *phy, nv_ipc_t *mac)
{
    static const int32_t ids[] = {-1, 0, 0x80, 0x81, 255, 256, INT32_MAX - 1, INT32_MIN};
    nv_ipc_debug_config_t *debug = &nv_ipc_get_primary_config(phy)->debug_configs;
    nv_ipc_msg_t msg;
    for (int turn = 0; turn < 2; turn++) {
        memset(debug->msg_filter, 0, sizeof(debug->msg_filter));
        memset(debug->cell_filter, turn, sizeof(debug->cell_filter));
        /* First by message id, then by cell id, which is higher by one. */
        (turn == 0 ? debug->msg_filter : debug->cell_filter)[0x80 + turn] = (uint8_t)(1 - turn);
        if (turn == 1)
            memset(debug->msg_filter, 1, sizeof(debug->msg_filter));
        CHECK(nvipc_fw_start(phy, 0) == 0);
        for (size_t i = 0; i < sizeof(ids) / sizeof(ids[0]); i++) {
            CHECK(sent(phy, ids[i], 0, 1) == 0);
            taken(mac, ids[i]);
        }
        if (turn == 0) {
            forwarded(phy, &msg, 0x80, 0, 1);
            CHECK(nvipc_fw_free(phy, &msg) == 0);
        } else {
            /* All cells that a filter can name, except one. */
            static const int32_t passed[] = {-1, 0, 0x81};
            for (int i = 0; i < 3; i++) {
                forwarded(phy, &msg, passed[i], 0, 1);
                CHECK(nvipc_fw_free(phy, &msg) == 0);
            }
        }
        empty(phy);
        CHECK(nvipc_fw_get_lost(phy) == 0 && nvipc_fw_reset(phy) == 0);
    }
    memset(debug->msg_filter, 0, sizeof(debug->msg_filter));
    memset(debug->cell_filter, 0, sizeof(debug->cell_filter));
}

#define MESSAGES 3000

static nv_ipc_t *seen_by;
static int seen[2];

/* Reads until the last message of each thread. */
static void *reader(void *last)
{
    int over = 0;
    while (!over) {
        nv_ipc_msg_t msg;
        CHECK(nvipc_fw_sem_wait(seen_by) == 0);
        while (nvipc_fw_dequeue(seen_by, &msg) == 0) {
            int by = msg.msg_id / MESSAGES, number = msg.msg_id % MESSAGES;
            over |= msg.msg_id == *(int *)last;
            if (!over) {
                CHECK(by < 2 && number >= seen[by] && *(unsigned char *)msg.msg_buf == (unsigned char)number);
                seen[by] = number + 1;
            }
            CHECK(nvipc_fw_free(seen_by, &msg) == 0);
        }
    }
    return NULL;
}

static void *sender(void *first)
{
    for (int i = 0; i < MESSAGES; i++)
        while (sent(seen_by, *(int *)first + i, 0, (unsigned char)i) != 0)
            sched_yield();
    return NULL;
}

/* Several threads send, one reads: messages are in order, and lost ones are counted. */
static void threads(nv_ipc_t *phy, nv_ipc_t *mac)
{
    pthread_t reads, sends[2];
    int first[2] = {0, MESSAGES}, last = 2 * MESSAGES;
    seen_by = phy;
    CHECK(nvipc_fw_start(phy, 0) == 0 && pthread_create(&reads, NULL, reader, &last) == 0);
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&sends[i], NULL, sender, &first[i]) == 0);
    nv_ipc_msg_t msg;
    for (int i = 0; i < 2 * MESSAGES; i++) {
        received(mac, &msg);
        CHECK(mac->rx_release(mac, &msg) == 0);
    }
    for (int i = 0; i < 2; i++)
        CHECK(pthread_join(sends[i], NULL) == 0);
    /* Retry until the tap has room. */
    for (uint32_t lost = UINT32_MAX; lost != nvipc_fw_get_lost(phy);) {
        lost = nvipc_fw_get_lost(phy);
        CHECK(sent(phy, last, 0, 1) == 0);
        received(mac, &msg);
        CHECK(mac->rx_release(mac, &msg) == 0);
    }
    CHECK(pthread_join(reads, NULL) == 0 && nvipc_fw_reset(phy) == 0);
}

static void *sleeper(void *args)
{
    nv_ipc_t *ipc = args;
    /* Before the instance is destroyed, or during it. */
    CHECK(nvipc_fw_sem_wait(ipc) == -1);
    return NULL;
}

int main(void)
{
    begin();
    nv_ipc_t *phy = opened("forward", NV_IPC_MODULE_PRIMARY), *mac = opened("forward", NV_IPC_MODULE_SECONDARY);
    struct timespec wrong = {.tv_sec = 0, .tv_nsec = 1000000000};
    CHECK(nvipc_fw_sem_timedwait(phy, &wrong) == -1);
    both_ways(phy, mac);
    so_many(phy, mac);
    stuck(phy, mac);
    filters(phy, mac);
    threads(phy, mac);
    pthread_t sleeps;
    CHECK(pthread_create(&sleeps, NULL, sleeper, mac) == 0);
    CHECK(mac->ipc_destroy(mac) == 0 && pthread_join(sleeps, NULL) == 0);
    CHECK(phy->ipc_destroy(phy) == 0 && nvipc_fw_start(phy, 0) == -1);
    /* Started with the instance, as configured. */
    nv_ipc_config_t cfg = small("traced", NV_IPC_MODULE_PRIMARY);
    cfg.debug_configs.grpc_forward = 2;
    phy = create_nv_ipc_interface(&cfg);
    CHECK(phy != NULL && nvipc_fw_get_started(phy) == 1);
    mac = opened("traced", NV_IPC_MODULE_SECONDARY);
    CHECK(nvipc_fw_get_started(mac) == 0);
    nv_ipc_msg_t msg;
    for (int i = 0; i < 3; i++) {
        CHECK(sent(phy, i, 0, 1) == 0);
        taken(mac, i);
    }
    forwarded(phy, &msg, 0, 0, 1);
    forwarded(phy, &msg, 1, 0, 1);
    empty(phy);
    CHECK(mac->ipc_destroy(mac) == 0 && phy->ipc_destroy(phy) == 0);
    return 0;
}
