/* DATA parts in device memory: on the GPU of the first argument, or for -1 in host memory. */
#include "check.h"

#define ROUNDS 50

static int gpu;

static nv_ipc_config_t config(nv_ipc_module_t module)
{
    nv_ipc_config_t cfg = small("devices", module);
    nv_ipc_mempool_size_t *size = cfg.transport_config.shm.mempool_size;
    size[NV_IPC_MEMPOOL_CUDA_DATA] = (nv_ipc_mempool_size_t){4000, 4};
    size[NV_IPC_MEMPOOL_GPU_DATA] = (nv_ipc_mempool_size_t){512, 2};
    cfg.transport_config.shm.cuda_device_id = gpu;
    return cfg;
}

static int32_t pool_of(int i)
{
    return i % 2 == 0 ? NV_IPC_MEMPOOL_CUDA_DATA : NV_IPC_MEMPOOL_GPU_DATA;
}

static int to_host(nv_ipc_t *ipc, int32_t pool, void *host, const void *device, size_t size)
{
    return pool == NV_IPC_MEMPOOL_CUDA_DATA ? ipc->cuda_memcpy_to_host(ipc, host, device, size)
                                            : ipc->gdr_memcpy_to_host(ipc, host, device, size);
}

static int to_device(nv_ipc_t *ipc, int32_t pool, void *device, const void *host, size_t size)
{
    return pool == NV_IPC_MEMPOOL_CUDA_DATA ? ipc->cuda_memcpy_to_device(ipc, device, host, size)
                                            : ipc->gdr_memcpy_to_device(ipc, device, host, size);
}

static void fill(nv_ipc_t *ipc, nv_ipc_msg_t *msg, int i)
{
    unsigned char bytes[512];
    memset(bytes, i + 1, sizeof(bytes));
    CHECK(msg->data_buf != NULL && is_device_pointer(msg->data_buf) == (gpu >= 0));
    CHECK(to_device(ipc, pool_of(i), msg->data_buf, bytes, sizeof(bytes) - 7) == 0);
    msg->msg_id = i;
    msg->cell_id = 0;
    msg->msg_len = 0;
    msg->data_len = (int32_t)sizeof(bytes) - 7;
}

static void is_filled(nv_ipc_t *ipc, const nv_ipc_msg_t *msg, int i)
{
    unsigned char bytes[512];
    CHECK(msg->msg_id == i && msg->data_pool == pool_of(i) && msg->data_len == (int32_t)sizeof(bytes) - 7);
    CHECK(to_host(ipc, pool_of(i), bytes, msg->data_buf, (size_t)msg->data_len) == 0);
    for (int32_t at = 0; at < msg->data_len; at++)
        CHECK(bytes[at] == (unsigned char)(i + 1));
}

static void send_one(nv_ipc_t *ipc, int i)
{
    nv_ipc_msg_t msg;
    memset(&msg, 0, sizeof(msg));
    msg.data_pool = pool_of(i);
    while (ipc->tx_allocate(ipc, &msg, 0) != 0)
        sched_yield();
    fill(ipc, &msg, i);
    CHECK(ipc->tx_send_msg(ipc, &msg) == 0);
}

static void receive_one(nv_ipc_t *ipc, int i)
{
    nv_ipc_msg_t msg;
    received(ipc, &msg);
    is_filled(ipc, &msg, i);
    CHECK(ipc->rx_release(ipc, &msg) == 0);
}

/* Sends a received message back, as some programs do. */
static void send_back(nv_ipc_t *ipc, int i)
{
    nv_ipc_msg_t msg;
    received(ipc, &msg);
    is_filled(ipc, &msg, i);
    while (ipc->tx_send_msg(ipc, &msg) != 0)
        sched_yield();
}

static void secondary(void)
{
    nv_ipc_config_t cfg = config(NV_IPC_MODULE_MAC);
    cfg.transport_config.shm.cuda_device_id = -1;
    nv_ipc_t *ipc = create_nv_ipc_interface(&cfg);
    CHECK(ipc != NULL);
    CHECK(cfg.transport_config.shm.cuda_device_id == gpu);
    CHECK(nv_ipc_get_pool_len(&cfg, NV_IPC_MEMPOOL_CUDA_DATA) == 4);
    CHECK(nv_ipc_check_host_pinned_memory(ipc) == (gpu >= 0 ? 0 : -1));
    for (int i = 0; i < ROUNDS; i++)
        receive_one(ipc, i);
    for (int i = 0; i < ROUNDS; i++)
        send_one(ipc, i);
    send_back(ipc, 0);
    send_back(ipc, 1);
    CHECK(ipc->ipc_destroy(ipc) == 0);
}

static void refuses(nv_ipc_t *ipc)
{
    nv_ipc_msg_t msg, other;
    memset(&msg, 0, sizeof(msg));
    msg.data_pool = NV_IPC_MEMPOOL_CUDA_DATA;
    CHECK(ipc->tx_allocate(ipc, &msg, 0) == 0);
    char host[8192], *device = msg.data_buf;
    memset(host, 0, sizeof(host));
    CHECK(to_device(ipc, msg.data_pool, device, host, 4000) == 0 && to_device(ipc, msg.data_pool, device + 3999, host, 1) == 0);
    CHECK(to_device(ipc, msg.data_pool, device, host, 4001) == -1 && to_host(ipc, msg.data_pool, host, device, 4001) == -1);
    CHECK(to_device(ipc, msg.data_pool, device + 4000, host, 1) == -1 && to_host(ipc, msg.data_pool, host, device + 1, 4000) == -1);
    CHECK(to_device(ipc, msg.data_pool, device, host, SIZE_MAX) == -1 && to_host(ipc, msg.data_pool, host, device, SIZE_MAX) == -1);
    CHECK(to_device(ipc, msg.data_pool, host, host, 1) == -1 && to_host(ipc, msg.data_pool, host, host, 1) == -1);
    CHECK(to_device(ipc, msg.data_pool, NULL, host, 1) == -1 && to_host(ipc, msg.data_pool, NULL, device, 1) == -1);
    CHECK(to_host(ipc, msg.data_pool, host, msg.msg_buf, 1) == -1);
    CHECK(!is_device_pointer(host) && !is_device_pointer(NULL) && !is_device_pointer(msg.msg_buf));
    /* Longer than its buffer, then unchanged. */
    msg.data_len = 4001;
    CHECK(ipc->tx_send_msg(ipc, &msg) == -1);
    other = msg;
    other.data_buf = device + 1;
    other.data_len = 1;
    CHECK(ipc->tx_send_msg(ipc, &other) == -1);
    CHECK(ipc->tx_release(ipc, &msg) == 0);
}

int main(int argc, char **argv)
{
    begin();
    CHECK(argc >= 2);
    gpu = atoi(argv[1]);
    if (argc > 2) {
        secondary();
        return 0;
    }
    pid_t child = start_again(argv[1], "secondary", NULL);
    nv_ipc_config_t cfg = config(NV_IPC_MODULE_PHY);
    nv_ipc_t *ipc = create_nv_ipc_interface(&cfg);
    CHECK(ipc != NULL);
    CHECK(cuda_get_device_count() >= gpu + 1);
    CHECK(nv_ipc_check_host_pinned_memory(ipc) == (gpu >= 0 ? 0 : -1));
    refuses(ipc);
    for (int i = 0; i < ROUNDS; i++)
        send_one(ipc, i);
    for (int i = 0; i < ROUNDS; i++)
        receive_one(ipc, i);
    CHECK(nvipc_fw_start(ipc, 0) == 0);
    for (int i = 0; i < 2; i++)
        send_one(ipc, i);
    for (int i = 0; i < 2; i++)
        receive_one(ipc, i);
    /* The tap gets what the CPU can read. */
    for (int i = 0; i < 4; i++) {
        nv_ipc_msg_t msg;
        CHECK(nvipc_fw_dequeue(ipc, &msg) == 0 && msg.msg_id == i % 2 && msg.msg_buf != NULL);
        CHECK(msg.data_buf == NULL && msg.data_pool == 0 && msg.data_len == 0 && nvipc_fw_free(ipc, &msg) == 0);
    }
    CHECK(nvipc_fw_get_lost(ipc) == 0 && nvipc_fw_reset(ipc) == 0);
    succeeds(child);
    CHECK(ipc->ipc_destroy(ipc) == 0);
    if (gpu >= 0) {
        /* A GPU number that does not exist: the pools are in host memory. */
        falls_back(1000);
    }
    return 0;
}
