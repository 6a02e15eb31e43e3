/* Behaviour that is specific to NVIPC's layout. Run with SHMESH_NVIPC_LAYOUT=nvipc. */
#include "check.h"

#include <sys/socket.h>

static int asked;

static int let_in(void *args)
{
    CHECK(args == &asked);
    __atomic_fetch_add(&asked, 1, __ATOMIC_RELAXED);
    return 0;
}

static void secondary(int32_t id)
{
    nv_ipc_t *mac = opened("theirs", NV_IPC_MODULE_SECONDARY);
    CHECK(sent(mac, id, NV_IPC_MEMPOOL_CPU_DATA, 5) == 0);
    posted(mac);
    CHECK(mac->rx_tti_sem_wait(mac) == 0);
    nv_ipc_msg_t msg;
    received(mac, &msg);
    CHECK(msg.msg_id == id && mac->rx_release(mac, &msg) == 0);
    CHECK(mac->ipc_destroy(mac) == 0);
}

static int returned;

static void *waits(void *ipc)
{
    CHECK(((nv_ipc_t *)ipc)->rx_tti_sem_wait(ipc) == -1);
    __atomic_store_n(&returned, 1, __ATOMIC_SEQ_CST);
    return NULL;
}

/* After the primary ends a wait continues, so that a loop around it does not spin. Destroying the instance ends it. */
static void a_wait_outlasts_the_primary(void)
{
    int pair[2], pidfd;
    socklen_t len = sizeof(pidfd);
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    /* SO_PEERPIDFD, since Linux 6.5: without it, no death is detected. */
    int is_noticed = getsockopt(pair[0], SOL_SOCKET, 77, &pidfd, &len) == 0;
    if (!is_noticed)
        return;
    pid_t child = start_again("gone", NULL, NULL);
    nv_ipc_t *mac = opened("gone", NV_IPC_MODULE_SECONDARY);
    pthread_t waiter;
    CHECK(pthread_create(&waiter, NULL, waits, mac) == 0);
    CHECK(kill(child, SIGKILL) == 0 && waitpid(child, NULL, 0) == child);
    nv_ipc_msg_t msg;
    memset(&msg, 0, sizeof(msg));
    /* Fails once the death is detected. */
    while (mac->tx_allocate(mac, &msg, 0) == 0) {
        CHECK(mac->tx_release(mac, &msg) == 0);
        usleep(1000);
    }
    usleep(20000);
    CHECK(__atomic_load_n(&returned, __ATOMIC_SEQ_CST) == 0);
    CHECK(mac->ipc_destroy(mac) == 0 && pthread_join(waiter, NULL) == 0);
    /* The successor replaces the files that it left. */
    nv_ipc_t *successor = opened("gone", NV_IPC_MODULE_PRIMARY);
    CHECK(successor->ipc_destroy(successor) == 0);
}

int main(int argc, char **argv)
{
    begin();
    if (argc > 1 && strcmp(argv[1], "gone") == 0) {
        opened("gone", NV_IPC_MODULE_PRIMARY);
        for (;;)
            pause();
    }
    if (argc > 1) {
        int id = atoi(argv[1]);
        if (id == 1)
            await_byte(STDIN_FILENO);
        secondary(id);
        return 0;
    }
    a_wait_outlasts_the_primary();
    falls_back(0);
    falls_back(-1);
    int gate[2];
    CHECK(pipe2(gate, O_CLOEXEC) == 0 && dup2(gate[0], STDIN_FILENO) == STDIN_FILENO);
    pid_t child[2] = {start_again("0", NULL, NULL), start_again("1", NULL, NULL)};
    nv_ipc_t *phy = opened("theirs", NV_IPC_MODULE_PRIMARY);
    CHECK(nv_ipc_set_reset_callback(phy, let_in, &asked) == 0);
    nv_ipc_msg_t msg;
    for (int i = 0; i < 2; i++) {
        CHECK(phy->rx_tti_sem_wait(phy) == 0);
        received(phy, &msg);
        CHECK(msg.msg_id == i && *(unsigned char *)msg.data_buf == 5 && nv_ipc_get_ts_send(phy, &msg) > 1600000000000000000);
        CHECK(phy->rx_release(phy, &msg) == 0 && phy->rx_release(phy, &msg) == -1);
        CHECK(sent(phy, i, 0, 1) == 0);
        posted(phy);
        succeeds(child[i]);
        CHECK(__atomic_load_n(&asked, __ATOMIC_RELAXED) == i);
        if (i == 0)
            tell(gate[1]);
    }
    /* No peer is connected. Calls that must fail do. */
    memset(&msg, 0, sizeof(msg));
    msg.data_pool = NV_IPC_MEMPOOL_GPU_DATA;
    CHECK(phy->tx_allocate(phy, &msg, 0) == -1 && msg.msg_buf == NULL);
    msg.data_pool = NV_IPC_MEMPOOL_CPU_DATA;
    /* What the last peer had at hand comes back a moment after its end. */
    while (phy->tx_allocate(phy, &msg, 0) != 0)
        usleep(1000);
    msg.msg_len = 513;
    CHECK(phy->tx_send_msg(phy, &msg) == -1);
    msg.msg_len = 1;
    msg.data_len = 4097;
    CHECK(phy->tx_send_msg(phy, &msg) == -1);
    msg.data_len = -1;
    CHECK(phy->tx_send_msg(phy, &msg) == -1);
    char foreign[8];
    nv_ipc_msg_t wrong = msg;
    wrong.msg_buf = foreign;
    CHECK(phy->tx_send_msg(phy, &wrong) == -1);
    CHECK(phy->tx_release(phy, &msg) == 0 && phy->tx_release(phy, &msg) == -1);
    /* Another link with that name, in either layout. */
    nv_ipc_config_t cfg = small("theirs", NV_IPC_MODULE_PRIMARY);
    CHECK(create_nv_ipc_interface(&cfg) == NULL);
    setenv("SHMESH_NVIPC_LAYOUT", "shmesh", 1);
    CHECK(create_nv_ipc_interface(&cfg) == NULL);
    CHECK(nv_ipc_lookup_config(&cfg, "theirs", NV_IPC_MODULE_MAC) == -1);
    CHECK(phy->ipc_destroy(phy) == 0);
    CHECK(phy->tx_tti_sem_post(phy) == -1);

    /* The layout comes from the file, on both sides. */
    unsetenv("SHMESH_NVIPC_LAYOUT");
    char path[4096];
    snprintf(path, sizeof(path), "%s/theirs.yaml", getenv("SHMESH_DIR"));
    FILE *file = fopen(path, "w");
    CHECK(file != NULL && fputs("transport:\n  type: shm\n  layout: nvipc\n  shm_config:\n    prefix: by-file\n"
                                "    mempool_size:\n      cpu_msg: {buf_size: 512, pool_len: 16}\n"
                                "      cpu_data: {buf_size: 4096, pool_len: 8}\n      cpu_large: {buf_size: 0, pool_len: 0}\n", file) >= 0);
    CHECK(fclose(file) == 0 && load_nv_ipc_yaml_config(&cfg, path, NV_IPC_MODULE_PHY) == 0 && unlink(path) == 0);
    CHECK((phy = create_nv_ipc_interface(&cfg)) != NULL);
    snprintf(path, sizeof(path), "%s/by-file_un_sock_server", getenv("SHMESH_DIR"));
    CHECK(access(path, F_OK) == 0);
    cfg.module_type = NV_IPC_MODULE_MAC;
    nv_ipc_t *mac = create_nv_ipc_interface(&cfg);
    CHECK(mac != NULL && cfg.transport_config.shm.mempool_size[0].pool_len == 16);
    CHECK(sent(mac, 1, 0, 9) == 0 && phy->rx_recv_msg(phy, &msg) == 0 && *(char *)msg.msg_buf == 9);
    CHECK(phy->rx_release(phy, &msg) == 0 && mac->ipc_destroy(mac) == 0 && phy->ipc_destroy(phy) == 0);
    return 0;
}
