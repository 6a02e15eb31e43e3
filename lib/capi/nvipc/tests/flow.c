/* Messages between two processes: allocate, fill, send, notify, wait, receive, release; both directions, every pool. */
#include "check.h"

#define ROUNDS 200
#define EARLY 3

/* Fills both parts with bytes that the other side can check. */
static void fill(nv_ipc_msg_t *msg, int i, int32_t buf_size)
{
    memset(msg->msg_buf, i, 512);
    msg->msg_id = i;
    msg->cell_id = -i;
    msg->msg_len = i % 512 + 1;
    msg->data_len = 0;
    if (msg->data_buf != NULL) {
        msg->data_len = buf_size - i % 7;
        memset(msg->data_buf, i + 1, (size_t)msg->data_len);
    }
}

static void is_filled(const nv_ipc_msg_t *msg, int i, int32_t pool, int32_t buf_size)
{
    CHECK(msg->msg_id == i && msg->cell_id == -i && msg->msg_len == i % 512 + 1);
    for (int32_t at = 0; at < msg->msg_len; at++)
        CHECK(((unsigned char *)msg->msg_buf)[at] == (unsigned char)i);
    CHECK(msg->data_pool == pool && (msg->data_buf != NULL) == (pool != 0));
    CHECK(msg->data_len == (pool != 0 ? buf_size - i % 7 : 0));
    for (int32_t at = 0; at < msg->data_len; at++)
        CHECK(((unsigned char *)msg->data_buf)[at] == (unsigned char)(i + 1));
}

static int32_t pool_of(int i)
{
    static const int32_t pools[] = {0, NV_IPC_MEMPOOL_CPU_DATA, NV_IPC_MEMPOOL_CPU_LARGE};
    return pools[i % 3];
}

static void send_one(nv_ipc_t *ipc, const nv_ipc_config_t *cfg, int i)
{
    nv_ipc_msg_t msg;
    memset(&msg, 0x5a, sizeof(msg));
    msg.data_pool = pool_of(i) != 0 ? pool_of(i) : -1;
    CHECK(ipc->tx_allocate(ipc, &msg, 0) == 0);
    CHECK(msg.msg_buf != NULL && (msg.data_buf != NULL) == (pool_of(i) != 0));
    fill(&msg, i, nv_ipc_get_buf_size(cfg, (nv_ipc_mempool_id_t)pool_of(i)));
    CHECK(ipc->tx_send_msg(ipc, &msg) == 0);
}

static void receive_one(nv_ipc_t *ipc, const nv_ipc_config_t *cfg, int i)
{
    nv_ipc_msg_t msg;
    received(ipc, &msg);
    is_filled(&msg, i, pool_of(i), nv_ipc_get_buf_size(cfg, (nv_ipc_mempool_id_t)pool_of(i)));
    CHECK(ipc->rx_release(ipc, &msg) == 0);
}

/* Sleeps in epoll. There is a signal for each notification. */
static void sleep_in_epoll(nv_ipc_t *ipc, int epoll)
{
    struct epoll_event event;
    int ready;
    do
        ready = epoll_wait(epoll, &event, 1, -1);
    while (ready < 0 && errno == EINTR);
    CHECK(ready == 1 && ipc->get_value(ipc) == 1);
}

static void secondary(void)
{
    nv_ipc_config_t cfg;
    memset(&cfg, 0, sizeof(cfg));
    cfg.ipc_transport = NV_IPC_TRANSPORT_SHM;
    CHECK(set_nv_ipc_default_config(&cfg, NV_IPC_MODULE_MAC) == 0);
    strcpy(cfg.transport_config.shm.prefix, "flow");
    /* Its own sizes do not matter, also if they are smaller than the link's. */
    cfg.transport_config.shm.ring_len = 4;
    cfg.transport_config.shm.mempool_size[NV_IPC_MEMPOOL_CPU_MSG] = (nv_ipc_mempool_size_t){64, 2};
    nv_ipc_t *ipc = create_nv_ipc_interface(&cfg);
    CHECK(ipc != NULL);
    CHECK(cfg.transport_config.shm.ring_len >= 16);
    /* The configuration of the primary, with this process's own side. */
    CHECK(cfg.module_type == NV_IPC_MODULE_MAC && strcmp(cfg.transport_config.shm.prefix, "flow") == 0);
    CHECK(nv_ipc_get_buf_size(&cfg, NV_IPC_MEMPOOL_CPU_DATA) == 4096);
    CHECK(nv_ipc_get_pool_len(&cfg, NV_IPC_MEMPOOL_CPU_MSG) == 16);
    CHECK(nv_ipc_get_pool_len(&cfg, NV_IPC_MEMPOOL_GPU_DATA) == 0);

    for (int i = 0; i < ROUNDS; i++) {
        send_one(ipc, &cfg, i);
        CHECK(ipc->notify(ipc, 1) == 0);
        CHECK(ipc->rx_tti_sem_wait(ipc) == 0);
        receive_one(ipc, &cfg, i + 1);
    }
    /* One TTI: several messages, one post. */
    for (int slot = 0; slot < 20; slot++) {
        for (int i = 0; i < 3; i++)
            send_one(ipc, &cfg, slot + i);
        posted(ipc);
        CHECK(ipc->rx_tti_sem_wait(ipc) == 0);
        receive_one(ipc, &cfg, slot);
    }
    for (int i = 0; i < EARLY; i++)
        CHECK(ipc->notify(ipc, 1) == 0);
    send_one(ipc, &cfg, EARLY);
    receive_one(ipc, &cfg, EARLY);
    for (int i = 0; i < ROUNDS; i++) {
        send_one(ipc, &cfg, i);
        CHECK(ipc->notify(ipc, 1) == 0);
        CHECK(ipc->get_value(ipc) == 1);
        receive_one(ipc, &cfg, i);
    }
    CHECK(ipc->ipc_destroy(ipc) == 0);
}

int main(int argc, char **argv)
{
    (void)argv;
    begin();
    if (argc > 1) {
        secondary();
        return 0;
    }
    /* The secondary starts first and waits for the primary. */
    pid_t child = start_again("secondary", NULL, NULL);
    nv_ipc_config_t cfg = small("flow", NV_IPC_MODULE_PRIMARY);
    nv_ipc_t *ipc = create_nv_ipc_interface(&cfg);
    CHECK(ipc != NULL);
    for (int i = 0; i < ROUNDS; i++) {
        CHECK(ipc->get_value(ipc) == 1);
        receive_one(ipc, &cfg, i);
        send_one(ipc, &cfg, i + 1);
        posted(ipc);
    }
    for (int slot = 0; slot < 20; slot++) {
        CHECK(ipc->rx_tti_sem_wait(ipc) == 0);
        for (int i = 0; i < 3; i++)
            receive_one(ipc, &cfg, slot + i);
        nv_ipc_msg_t none;
        CHECK(ipc->rx_recv_msg(ipc, &none) == -1);
        send_one(ipc, &cfg, slot);
        CHECK(ipc->notify(ipc, 7) == 0);
    }
    /* What was notified before get_fd makes the descriptor readable. */
    receive_one(ipc, &cfg, EARLY);
    int fd = ipc->get_fd(ipc);
    struct pollfd readable = {.fd = fd, .events = POLLIN};
    for (int i = 0; i < EARLY; i++)
        CHECK(poll(&readable, 1, 0) == 1 && ipc->get_value(ipc) == 1);
    CHECK(poll(&readable, 1, 0) == 0);
    send_one(ipc, &cfg, EARLY);
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN, .data = {.fd = fd}};
    CHECK(fd >= 0 && epoll >= 0 && epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0);
    for (int done = 0; done < ROUNDS;) {
        nv_ipc_msg_t msg;
        if (ipc->rx_recv_msg(ipc, &msg) != 0) {
            sleep_in_epoll(ipc, epoll);
            continue;
        }
        is_filled(&msg, done, pool_of(done), nv_ipc_get_buf_size(&cfg, (nv_ipc_mempool_id_t)pool_of(done)));
        CHECK(ipc->rx_release(ipc, &msg) == 0);
        send_one(ipc, &cfg, done++);
        CHECK(ipc->notify(ipc, 1) == 0);
    }
    succeeds(child);
    CHECK(ipc->ipc_destroy(ipc) == 0);
    close(epoll);
    return 0;
}
