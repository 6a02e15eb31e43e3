/* Calls that must fail with -1 or NULL, and leave the link as it was. */
#include "check.h"

static nv_ipc_t *phy, *mac;

/* Checks that all buffers are free: as many can be allocated as the pool has, and not one more. */
static void all_are_free(nv_ipc_t *ipc)
{
    nv_ipc_msg_t all[16], one_more;
    for (int i = 0; i < 16; i++) {
        memset(&all[i], 0, sizeof(all[i]));
        all[i].data_pool = i < 8 ? NV_IPC_MEMPOOL_CPU_DATA : i < 12 ? NV_IPC_MEMPOOL_CPU_LARGE : -1;
        CHECK(ipc->tx_allocate(ipc, &all[i], 0) == 0);
    }
    memset(&one_more, 0, sizeof(one_more));
    CHECK(ipc->tx_allocate(ipc, &one_more, 0) == -1);
    CHECK(one_more.msg_buf == NULL && one_more.data_buf == NULL);
    for (int i = 0; i < 16; i++)
        CHECK(ipc->tx_release(ipc, &all[i]) == 0);
}

static nv_ipc_msg_t allocated(nv_ipc_t *ipc, int32_t pool)
{
    nv_ipc_msg_t msg;
    memset(&msg, 0, sizeof(msg));
    msg.data_pool = pool;
    CHECK(ipc->tx_allocate(ipc, &msg, 0) == 0);
    return msg;
}

static int callback(void *args)
{
    (void)args;
    return 0;
}

static void nulls(void)
{
    nv_ipc_msg_t msg = allocated(phy, 1);
    nv_ipc_msg_t empty;
    memset(&empty, 0, sizeof(empty));
    nv_ipc_config_t cfg;
    memset(&cfg, 0, sizeof(cfg));
    CHECK(phy->tx_allocate(NULL, &msg, 0) == -1 && phy->tx_allocate(phy, NULL, 0) == -1);
    CHECK(phy->tx_release(NULL, &msg) == -1 && phy->tx_release(phy, NULL) == -1);
    CHECK(phy->tx_release(phy, &empty) == -1 && phy->rx_release(phy, &empty) == -1);
    CHECK(phy->rx_allocate(NULL, &msg, 0) == -1 && phy->rx_allocate(phy, NULL, 0) == -1);
    CHECK(phy->tx_send_msg(NULL, &msg) == -1 && phy->tx_send_msg(phy, NULL) == -1);
    CHECK(phy->tx_send_msg(phy, &empty) == -1);
    CHECK(phy->rx_recv_msg(NULL, &empty) == -1 && phy->rx_recv_msg(phy, NULL) == -1);
    CHECK(phy->tx_tti_sem_post(NULL) == -1 && phy->rx_tti_sem_wait(NULL) == -1);
    CHECK(phy->notify(NULL, 1) == -1 && phy->get_value(NULL) == -1 && phy->get_fd(NULL) == -1);
    CHECK(phy->cuda_memcpy_to_host(NULL, NULL, NULL, 1) == -1 && phy->cuda_memcpy_to_device(phy, NULL, NULL, 1) == -1);
    CHECK(phy->gdr_memcpy_to_host(phy, NULL, NULL, 1) == -1 && phy->gdr_memcpy_to_device(NULL, NULL, NULL, 1) == -1);
    CHECK(phy->ipc_destroy(NULL) == -1);
    CHECK(set_nv_ipc_default_config(NULL, NV_IPC_MODULE_PRIMARY) == -1);
    CHECK(load_nv_ipc_yaml_config(NULL, "x.yaml", NV_IPC_MODULE_PRIMARY) == -1);
    CHECK(load_nv_ipc_yaml_config(&cfg, NULL, NV_IPC_MODULE_PRIMARY) == -1);
    CHECK(create_nv_ipc_interface(NULL) == NULL);
    CHECK(nv_ipc_get_buf_size(NULL, NV_IPC_MEMPOOL_CPU_MSG) == -1);
    CHECK(nv_ipc_get_pool_len(NULL, NV_IPC_MEMPOOL_CPU_MSG) == -1);
    CHECK(nv_ipc_get_sfn_slot(NULL).u32 == SFN_SLOT_INVALID && nv_ipc_get_sfn_slot(&empty).u32 == SFN_SLOT_INVALID);
    nv_ipc_set_handle_id(NULL, 1);
    nv_ipc_set_handle_id(&empty, 1);
    CHECK(nv_ipc_get_ts_send(NULL, &msg) == -1 && nv_ipc_get_ts_send(phy, NULL) == -1);
    CHECK(nv_ipc_shm_send_loopback(NULL, &msg) == -1 && nv_ipc_shm_send_loopback(phy, NULL) == -1);
    CHECK(nv_ipc_shm_send_loopback(phy, &empty) == -1);
    CHECK(nv_ipc_shm_rx_poll(NULL) == -1);
    CHECK(nv_ipc_set_reset_callback(NULL, callback, NULL) == -1 && nv_ipc_set_reset_callback(phy, NULL, NULL) == -1);
    CHECK(nv_ipc_get_primary_config(NULL) == NULL);
    CHECK(nv_ipc_lookup_config(NULL, "refusals", NV_IPC_MODULE_MAC) == -1);
    CHECK(nv_ipc_lookup_config(&cfg, NULL, NV_IPC_MODULE_MAC) == -1);
    CHECK(nv_ipc_dump(NULL) == -1 && nv_ipc_dump_config(NULL) == -1);
    CHECK(nv_ipc_check_host_pinned_memory(NULL) == -1 && cuda_get_device_count() >= 0);
    CHECK(!is_device_pointer(NULL));
    CHECK(nvipc_fw_start(NULL, 0) == -1 && nvipc_fw_stop(NULL) == -1 && nvipc_fw_reset(NULL) == -1);
    CHECK(nvipc_fw_sem_wait(NULL) == -1 && nvipc_fw_sem_timedwait(NULL, NULL) == -1);
    CHECK(nvipc_fw_enqueue(NULL, NULL) == -1 && nvipc_fw_dequeue(NULL, NULL) == -1 && nvipc_fw_free(NULL, NULL) == -1);
    CHECK(nvipc_fw_get_started(NULL) == -1 && nvipc_fw_get_lost(NULL) == 0);
    CHECK(phy->tx_release(phy, &msg) == 0);
}

static void lengths(void)
{
    static const struct { int32_t msg, data; int ok; } tried[] = {
        {-1, 0, 0}, {0, -1, 0}, {513, 0, 0}, {0, 4097, 0}, {INT32_MAX, 0, 0}, {INT32_MIN, 0, 0},
        {0, INT32_MAX, 0}, {0, INT32_MIN, 0}, {0, 0, 1}, {512, 4096, 1},
    };
    for (size_t i = 0; i < sizeof(tried) / sizeof(tried[0]); i++) {
        nv_ipc_msg_t msg = allocated(mac, NV_IPC_MEMPOOL_CPU_DATA);
        msg.msg_len = tried[i].msg;
        msg.data_len = tried[i].data;
        CHECK(mac->tx_send_msg(mac, &msg) == (tried[i].ok ? 0 : -1));
        nv_ipc_msg_t got;
        CHECK(phy->rx_recv_msg(phy, &got) == (tried[i].ok ? 0 : -1));
        if (tried[i].ok) {
            CHECK(got.msg_len == tried[i].msg && got.data_len == tried[i].data);
            CHECK(phy->rx_release(phy, &got) == 0);
        } else {
            /* The buffer is still held. */
            CHECK(mac->tx_release(mac, &msg) == 0);
        }
    }
    /* Without DATA, its length is ignored. */
    nv_ipc_msg_t msg = allocated(mac, -1), got;
    msg.msg_len = 1;
    msg.data_len = INT32_MIN;
    CHECK(mac->tx_send_msg(mac, &msg) == 0);
    CHECK(phy->rx_recv_msg(phy, &got) == 0 && got.data_len == 0 && got.data_pool == 0 && got.data_buf == NULL);
    CHECK(phy->rx_release(phy, &got) == 0);
}

static void pools(void)
{
    nv_ipc_msg_t msg;
    memset(&msg, 0, sizeof(msg));
    /* The pool is not configured. */
    msg.data_pool = NV_IPC_MEMPOOL_CUDA_DATA;
    CHECK(mac->tx_allocate(mac, &msg, 0) == -1 && msg.msg_buf == NULL);
    msg.data_pool = NV_IPC_MEMPOOL_GPU_DATA;
    CHECK(mac->tx_allocate(mac, &msg, 0) == -1 && msg.msg_buf == NULL);
    /* Invalid pool numbers mean no DATA, as in NVIPC. */
    static const int32_t none[] = {-1, 0, 5, 1000, INT32_MAX, INT32_MIN};
    for (size_t i = 0; i < sizeof(none) / sizeof(none[0]); i++) {
        msg.data_pool = none[i];
        CHECK(mac->tx_allocate(mac, &msg, 0) == 0 && msg.data_buf == NULL);
        msg.msg_len = msg.data_len = 0;
        if (none[i] >= 5)
            CHECK(mac->tx_send_msg(mac, &msg) == -1 && mac->tx_release(mac, &msg) == -1);
        msg.data_pool = -1;
        CHECK(mac->tx_release(mac, &msg) == 0);
    }
    /* Another pool than that of the buffer, and no pool at all. */
    msg = allocated(mac, NV_IPC_MEMPOOL_CPU_DATA);
    msg.data_pool = NV_IPC_MEMPOOL_CPU_LARGE;
    CHECK(mac->tx_send_msg(mac, &msg) == -1 && mac->tx_release(mac, &msg) == -1);
    msg.data_pool = NV_IPC_MEMPOOL_CPU_DATA;
    CHECK(mac->tx_release(mac, &msg) == 0);
    msg = allocated(mac, -1);
    msg.data_pool = NV_IPC_MEMPOOL_CPU_DATA;
    CHECK(mac->tx_send_msg(mac, &msg) == -1);
    CHECK(mac->tx_release(mac, &msg) == 0);
}

static void buffers(void)
{
    char foreign[512];
    nv_ipc_msg_t msg = allocated(mac, NV_IPC_MEMPOOL_CPU_DATA), wrong = msg, got;
    /* Addresses that were never handed out, and addresses inside a buffer. */
    void *tried[] = {foreign, (char *)msg.msg_buf + 1, (char *)msg.msg_buf - 64, (void *)8, (void *)UINTPTR_MAX};
    for (size_t i = 0; i < sizeof(tried) / sizeof(tried[0]); i++) {
        wrong.msg_buf = tried[i];
        CHECK(mac->tx_send_msg(mac, &wrong) == -1 && mac->tx_release(mac, &wrong) == -1);
        CHECK(nv_ipc_shm_send_loopback(mac, &wrong) == -1);
        wrong = msg;
        wrong.data_buf = tried[i];
        CHECK(mac->tx_send_msg(mac, &wrong) == -1 && mac->tx_release(mac, &wrong) == -1);
        CHECK(nv_ipc_shm_send_loopback(mac, &wrong) == -1);
        wrong = msg;
    }
    /* The other endpoint does not hold it. */
    CHECK(phy->tx_send_msg(phy, &msg) == -1 && phy->tx_release(phy, &msg) == -1);
    /* Released twice. */
    CHECK(mac->tx_release(mac, &msg) == 0 && mac->tx_release(mac, &msg) == -1);
    CHECK(mac->tx_send_msg(mac, &msg) == -1);
    /* After sending, the sender does not hold it. */
    msg = allocated(mac, NV_IPC_MEMPOOL_CPU_LARGE);
    msg.msg_len = msg.data_len = 1;
    CHECK(mac->tx_send_msg(mac, &msg) == 0 && mac->tx_send_msg(mac, &msg) == -1 && mac->tx_release(mac, &msg) == -1);
    CHECK(phy->rx_recv_msg(phy, &got) == 0);
    CHECK(phy->rx_release(phy, &got) == 0 && phy->rx_release(phy, &got) == -1);
    /* Without its address, the DATA part follows the MSG part. */
    msg = allocated(mac, NV_IPC_MEMPOOL_CPU_DATA);
    msg.data_buf = NULL;
    msg.data_pool = 0;
    CHECK(mac->tx_release(mac, &msg) == 0);
    /* A copy of an instance is not an instance, and neither is an address inside one. */
    nv_ipc_t copy = *mac;
    CHECK(copy.tx_tti_sem_post(&copy) == -1 && mac->tx_tti_sem_post((nv_ipc_t *)(void *)((char *)mac + 8)) == -1);
}

static void configurations(void)
{
    nv_ipc_config_t cfg = small("refusals", NV_IPC_MODULE_PRIMARY), good = cfg;
    for (int transport = -1; transport < 6; transport++) {
        cfg.ipc_transport = (nv_ipc_transport_t)transport;
        int known = transport >= 0 && transport < 4;
        CHECK(set_nv_ipc_default_config(&cfg, NV_IPC_MODULE_PRIMARY) == (known ? 0 : -1));
        if (transport != NV_IPC_TRANSPORT_SHM && transport != NV_IPC_TRANSPORT_UDP)
            CHECK(create_nv_ipc_interface(&cfg) == NULL);
    }
    cfg.ipc_transport = NV_IPC_TRANSPORT_UDP;
    CHECK(set_nv_ipc_default_config(&cfg, NV_IPC_MODULE_PRIMARY) == 0);
    CHECK(nv_ipc_get_buf_size(&cfg, NV_IPC_MEMPOOL_CPU_MSG) == -1);
    nv_ipc_config_t udp = cfg;
#define UDP_REFUSED(change)                           \
    do {                                              \
        cfg = udp;                                    \
        change;                                       \
        CHECK(create_nv_ipc_interface(&cfg) == NULL); \
    } while (0)
    UDP_REFUSED(cfg.transport_config.udp.local_port = -1);
    UDP_REFUSED(cfg.transport_config.udp.remote_port = 65536);
    UDP_REFUSED(cfg.transport_config.udp.remote_port = 0);
    UDP_REFUSED(strcpy(cfg.transport_config.udp.remote_addr, "nowhere"));
    UDP_REFUSED(memset(cfg.transport_config.udp.local_addr, '1', NV_IPV4_STRING_LEN));
    UDP_REFUSED(cfg.transport_config.udp.msg_buf_size = 0);
    UDP_REFUSED(cfg.transport_config.udp.msg_buf_size = -1);
    UDP_REFUSED(cfg.transport_config.udp.msg_buf_size = 15);
    UDP_REFUSED(cfg.transport_config.udp.data_buf_size = -1);
    cfg = good;
    CHECK(nv_ipc_get_buf_size(&cfg, (nv_ipc_mempool_id_t)-1) == -1 && nv_ipc_get_pool_len(&cfg, NV_IPC_MEMPOOL_NUM) == -1);
    CHECK(set_nv_ipc_default_config(&cfg, NV_IPC_MODULE_MAX) == -1);
    for (int module = 4; module < 7; module++) {
        cfg = good;
        cfg.module_type = (nv_ipc_module_t)module;
        CHECK(create_nv_ipc_interface(&cfg) == NULL);
    }
#define REFUSED(change)                               \
    do {                                              \
        cfg = good;                                   \
        strcpy(cfg.transport_config.shm.prefix, "other"); \
        change;                                       \
        CHECK(create_nv_ipc_interface(&cfg) == NULL); \
    } while (0)
    nv_ipc_config_shm_t *shm = &cfg.transport_config.shm;
    REFUSED(shm->prefix[0] = 0);
    REFUSED(strcpy(shm->prefix, "../../etc"));
    REFUSED(strcpy(shm->prefix, "with space"));
    REFUSED(memset(shm->prefix, 'a', NV_NAME_MAX_LEN));
    REFUSED(memset(shm->prefix, 0xff, NV_NAME_MAX_LEN - 1));
    REFUSED(shm->mempool_size[0].pool_len = 0);
    REFUSED(shm->mempool_size[0].buf_size = -1);
    REFUSED(shm->mempool_size[0].buf_size = 15);
    REFUSED(shm->mempool_size[1].pool_len = -1);
    REFUSED(shm->mempool_size[2].pool_len = INT32_MAX);
    /* The same link with another configuration. */
    cfg = good;
    shm->mempool_size[1].pool_len = 9;
    CHECK(create_nv_ipc_interface(&cfg) == NULL);
    CHECK(nv_ipc_lookup_config(&cfg, "nowhere", NV_IPC_MODULE_MAC) == -1);
    CHECK(nv_ipc_lookup_config(&cfg, "../x", NV_IPC_MODULE_MAC) == -1);
    cfg = small("nowhere", NV_IPC_MODULE_MAC);
    setenv("SHMESH_NVIPC_LAYOUT", "other", 1);
    CHECK(create_nv_ipc_interface(&cfg) == NULL);
    unsetenv("SHMESH_NVIPC_LAYOUT");
    setenv("SHMESH_NVIPC_TIMEOUT_S", "0.01", 1);
    CHECK(create_nv_ipc_interface(&cfg) == NULL);
    setenv("SHMESH_NVIPC_TIMEOUT_S", "soon", 1);
    CHECK(create_nv_ipc_interface(&cfg) == NULL);
    unsetenv("SHMESH_NVIPC_TIMEOUT_S");
}

static void yaml(const char *path)
{
    static const char *const wrong[] = {
        "", "transport:\n  type: dpdk\n", "transport: 7\n", "transport:\n  type: shm\n  layout: other\n",
        "transport:\n  type: udp\n  udp_config: {local_addr: 'a'}\n", "transport:\n  type: shm\n  shm_config:\n    prefix: 'a/b'\n",
        "transport:\n  type: shm\n  shm_config:\n    prefix: x\n    mempool_size:\n      cpu_msg: {buf_size: -1, pool_len: 8}\n",
        "transport:\n  type: shm\n  shm_config:\n    prefix: x\n    mempool_size:\n      cpu_msg: {buf_size: a, pool_len: 8}\n",
        "transport:\n  type: shm\n  shm_config: {prefix: x}\n  app_config: {msg_filter: [1, 256]}\n",
        "transport:\n  type: shm\n  shm_config: {prefix: x}\n  app_config: {cell_filter: [-1]}\n",
        "transport:\n  type: shm\n  shm_config: {prefix: x}\n  app_config: {cell_filter: [a]}\n",
        "transport:\n  type: shm\n  shm_config: {prefix: x}\n  app_config: {msg_filter: 7}\n",
        "transport:\n  type: shm\n  shm_config: {prefix: x}\n  app_config: {grpc_forward: a}\n",
        /* Settings that concern the layout must not be ignored. */
        "transport:\n  type: shm\n  layout: nvipc\n  udp_config: {local_port: a}\n  shm_config: {prefix: x}\n",
        "transport:\n  type: shm\n  layout: nvipc\n  shm_config: {prefix: x, cuda_device_id: a}\n",
        "transport:\n  type: shm\n  layout: [nvipc]\n  shm_config: {prefix: x}\n",
        "%\n", "a: [\n", "links: 3\n",
    };
    nv_ipc_config_t cfg, before;
    memset(&cfg, 0x77, sizeof(cfg));
    before = cfg;
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        FILE *file = fopen(path, "w");
        CHECK(file != NULL && fputs(wrong[i], file) >= 0 && fclose(file) == 0);
        CHECK(load_nv_ipc_yaml_config(&cfg, path, NV_IPC_MODULE_PRIMARY) == -1);
        CHECK(memcmp(&cfg, &before, sizeof(cfg)) == 0);
    }
    FILE *file = fopen(path, "w");
    CHECK(file != NULL);
    CHECK(fputs("transport:\n  type: shm\n  shm_config:\n    prefix: from-yaml\n    cuda_device_id: -1\n    ring_len: 64\n"
                "    mempool_size:\n      cpu_msg: {buf_size: 15000, pool_len: 128}\n      cpu_data: {buf_size: 576000, pool_len: 2}\n"
                "      cpu_large: {buf_size: 0, pool_len: 0}\n"
                "  app_config:\n    grpc_forward: 3\n    msg_filter: [0x82, 7]\n    cell_filter: []\n    debug_timing: {}\n", file) >= 0 && fclose(file) == 0);
    CHECK(load_nv_ipc_yaml_config(&cfg, path, 9) == -1 && memcmp(&cfg, &before, sizeof(cfg)) == 0);
    CHECK(load_nv_ipc_yaml_config(&cfg, path, NV_IPC_MODULE_PHY) == 0);
    CHECK(cfg.module_type == NV_IPC_MODULE_PHY && cfg.ipc_transport == NV_IPC_TRANSPORT_SHM);
    CHECK(strcmp(cfg.transport_config.shm.prefix, "from-yaml") == 0);
    CHECK(nv_ipc_get_buf_size(&cfg, NV_IPC_MEMPOOL_CPU_MSG) == 15000 && nv_ipc_get_pool_len(&cfg, NV_IPC_MEMPOOL_CPU_MSG) == 128);
    CHECK(nv_ipc_get_pool_len(&cfg, NV_IPC_MEMPOOL_CPU_LARGE) == 0);
    CHECK(nv_ipc_dump_config(&cfg) == 0);
    const nv_ipc_debug_config_t *debug = &cfg.debug_configs;
    CHECK(debug->grpc_forward == 3 && debug->msg_filter[7] == 1 && debug->msg_filter[0x82] == 1 && debug->msg_filter[0] == 0);
    CHECK(debug->cell_filter[0] == 1 && debug->cell_filter[255] == 1);
    nv_ipc_t *ipc = create_nv_ipc_interface(&cfg);
    CHECK(ipc != NULL && nvipc_fw_get_started(ipc) == 1 && nvipc_fw_start(ipc, 0) == -1);
    CHECK(ipc->ipc_destroy(ipc) == 0);
    CHECK(load_nv_ipc_yaml_config(&cfg, "/nowhere/at/all.yaml", NV_IPC_MODULE_PHY) == -1);
    file = fopen(path, "w");
    CHECK(file != NULL && fputs("transport:\n  type: UDP\n  udp_config:\n    remote_addr: 10.1.2.3\n    msg_buf_size: 200\n", file) >= 0);
    CHECK(fclose(file) == 0 && load_nv_ipc_yaml_config(&cfg, path, NV_IPC_MODULE_MAC) == 0);
    const nv_ipc_config_udp_t *udp = &cfg.transport_config.udp;
    CHECK(cfg.ipc_transport == NV_IPC_TRANSPORT_UDP && udp->local_port == 38555 && udp->remote_port == 38556);
    CHECK(strcmp(udp->remote_addr, "10.1.2.3") == 0 && udp->msg_buf_size == 200 && udp->data_buf_size == 153600);
}

/* Standard error is a pipe without a reader: the line is lost, nothing else happens. */
static void unread(void)
{
    int ends[2], kept = dup(2);
    sigset_t pending;
    CHECK(kept >= 0 && pipe(ends) == 0 && signal(SIGPIPE, SIG_DFL) != SIG_ERR);
    CHECK(dup2(ends[1], 2) == 2 && close(ends[0]) == 0 && close(ends[1]) == 0);
    int refused = create_nv_ipc_interface(NULL) == NULL;
    CHECK(dup2(kept, 2) == 2 && close(kept) == 0);
    CHECK(refused && sigpending(&pending) == 0 && !sigismember(&pending, SIGPIPE));
    sigset_t blocked;
    CHECK(pthread_sigmask(SIG_BLOCK, NULL, &blocked) == 0 && !sigismember(&blocked, SIGPIPE));
}

int main(int argc, char **argv)
{
    begin();
    CHECK(argc == 2);
    unread();
    phy = opened("refusals", NV_IPC_MODULE_PRIMARY);
    mac = opened("refusals", NV_IPC_MODULE_SECONDARY);
    void (*const all[])(void) = {nulls, lengths, pools, buffers, configurations};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        all[i]();
        all_are_free(phy);
        all_are_free(mac);
    }
    char path[4096];
    snprintf(path, sizeof(path), "%s/refused.yaml", argv[1]);
    yaml(path);
    CHECK(mac->ipc_destroy(mac) == 0 && mac->ipc_destroy(mac) == -1);
    CHECK(phy->ipc_destroy(phy) == 0);
    /* All functions of a destroyed instance fail. */
    nv_ipc_msg_t msg;
    memset(&msg, 0, sizeof(msg));
    CHECK(phy->tx_allocate(phy, &msg, 0) == -1 && phy->rx_recv_msg(phy, &msg) == -1);
    CHECK(phy->rx_tti_sem_wait(phy) == -1 && phy->get_value(phy) == -1 && phy->get_fd(phy) == -1);
    CHECK(nv_ipc_get_primary_config(phy) == NULL && nv_ipc_dump(phy) == -1);
    CHECK(nv_ipc_get_instance(NULL) == NULL);
    return 0;
}
