/* Either side is killed and restarts: no message is lost, no held buffer is taken away, and the link is not wiped. */
#include "check.h"

static pid_t started(const char *part, int *from_child, int *replies)
{
    int to_parent[2], to_child[2];
    CHECK(pipe2(to_parent, O_CLOEXEC) == 0 && pipe2(to_child, O_CLOEXEC) == 0);
    CHECK(fcntl(to_child[0], F_SETFD, 0) == 0 && fcntl(to_parent[1], F_SETFD, 0) == 0);
    char commands[16], replying[16];
    snprintf(commands, sizeof(commands), "%d", to_child[0]);
    snprintf(replying, sizeof(replying), "%d", to_parent[1]);
    pid_t child = start_again(part, commands, replying);
    close(to_parent[1]);
    close(to_child[0]);
    *from_child = to_parent[0];
    *replies = to_child[1];
    return child;
}

static void killed(pid_t child)
{
    int status;
    CHECK(kill(child, SIGKILL) == 0 && waitpid(child, &status, 0) == child && WIFSIGNALED(status));
}

/* Sends three messages, receives and holds five, and dies. */
static void greedy_secondary(int commands, int replies)
{
    nv_ipc_t *mac = opened("killed-mac", NV_IPC_MODULE_SECONDARY);
    for (int i = 0; i < 3; i++)
        CHECK(sent(mac, i, NV_IPC_MEMPOOL_CPU_DATA, (unsigned char)i) == 0);
    nv_ipc_msg_t msg;
    memset(&msg, 0, sizeof(msg));
    for (int i = 0; i < 5; i++) {
        msg.data_pool = i < 4 ? NV_IPC_MEMPOOL_CPU_DATA : NV_IPC_MEMPOOL_CPU_LARGE;
        CHECK(mac->tx_allocate(mac, &msg, 0) == 0);
    }
    received(mac, &msg);
    tell(replies);
    await_byte(commands);
}

static void second_secondary(int commands, int replies)
{
    nv_ipc_t *mac = opened("killed-mac", NV_IPC_MODULE_SECONDARY);
    CHECK(sent(mac, 50, 0, 5) == 0 && mac->tx_tti_sem_post(mac) == 0);
    CHECK(mac->rx_tti_sem_wait(mac) == 0);
    nv_ipc_msg_t msg;
    received(mac, &msg);
    CHECK(msg.msg_id == 60 && mac->rx_release(mac, &msg) == 0);
    tell(replies);
    await_byte(commands);
    CHECK(mac->ipc_destroy(mac) == 0);
}

static void the_secondary_is_killed(void)
{
    int from_greedy, to_greedy, from_second, to_second;
    pid_t greedy = started("greedy_secondary", &from_greedy, &to_greedy);
    nv_ipc_t *phy = opened("killed-mac", NV_IPC_MODULE_PRIMARY);
    CHECK(sent(phy, 40, 0, 4) == 0);
    nv_ipc_msg_t held, msg;
    memset(&held, 0, sizeof(held));
    CHECK(phy->tx_allocate(phy, &held, 0) == 0);
    memcpy(held.msg_buf, "still mine", 10);
    await_byte(from_greedy);
    killed(greedy);

    /* Its messages are delivered, and its buffers are recovered without a restart. */
    for (int i = 0; i < 3; i++) {
        CHECK(phy->rx_recv_msg(phy, &msg) == 0 && msg.msg_id == i && *(unsigned char *)msg.data_buf == i);
        CHECK(phy->rx_release(phy, &msg) == 0);
    }
    nv_ipc_msg_t all[15];
    for (int i = 0; i < 15; i++) {
        do {
            memset(&all[i], 0, sizeof(all[i]));
            all[i].data_pool = i < 8 ? NV_IPC_MEMPOOL_CPU_DATA : i < 12 ? NV_IPC_MEMPOOL_CPU_LARGE : 0;
        } while (phy->tx_allocate(phy, &all[i], 0) != 0);
    }
    for (int i = 0; i < 15; i++)
        CHECK(phy->tx_release(phy, &all[i]) == 0);

    /* The next secondary finds a link in use, and does not disturb it. */
    pid_t second = started("second_secondary", &from_second, &to_second);
    CHECK(phy->rx_tti_sem_wait(phy) == 0);
    received(phy, &msg);
    CHECK(msg.msg_id == 50 && phy->rx_release(phy, &msg) == 0);
    CHECK(memcmp(held.msg_buf, "still mine", 10) == 0);
    held.msg_id = 60;
    held.msg_len = 10;
    CHECK(phy->tx_send_msg(phy, &held) == 0 && phy->tx_tti_sem_post(phy) == 0);
    await_byte(from_second);
    tell(to_second);
    succeeds(second);
    CHECK(phy->ipc_destroy(phy) == 0);
}

static void first_primary(int commands, int replies)
{
    nv_ipc_t *phy = opened("killed-phy", NV_IPC_MODULE_PRIMARY);
    CHECK(sent(phy, 1, NV_IPC_MEMPOOL_CPU_LARGE, 1) == 0 && phy->tx_tti_sem_post(phy) == 0);
    tell(replies);
    await_byte(commands);
}

static void second_primary(int commands, int replies)
{
    nv_ipc_t *phy = opened("killed-phy", NV_IPC_MODULE_PRIMARY);
    nv_ipc_msg_t msg;
    /* What the secondary sent to the first primary. */
    CHECK(phy->rx_recv_msg(phy, &msg) == 0 && msg.msg_id == 2 && phy->rx_release(phy, &msg) == 0);
    CHECK(sent(phy, 3, 0, 3) == 0 && phy->tx_tti_sem_post(phy) == 0);
    tell(replies);
    await_byte(commands);
    CHECK(phy->ipc_destroy(phy) == 0);
}

static void the_primary_is_killed(void)
{
    int from_first, to_first, from_second, to_second;
    pid_t first = started("first_primary", &from_first, &to_first);
    nv_ipc_t *mac = opened("killed-phy", NV_IPC_MODULE_SECONDARY);
    await_byte(from_first);
    killed(first);
    /* The secondary continues: it gets no error and loses nothing. */
    nv_ipc_msg_t msg;
    CHECK(mac->rx_tti_sem_wait(mac) == 0 && mac->rx_recv_msg(mac, &msg) == 0);
    CHECK(msg.msg_id == 1 && *(unsigned char *)msg.data_buf == 1 && mac->rx_release(mac, &msg) == 0);
    CHECK(sent(mac, 2, 0, 2) == 0 && mac->tx_tti_sem_post(mac) == 0);
    /* The same instance of the secondary receives from the next primary. */
    pid_t second = started("second_primary", &from_second, &to_second);
    CHECK(mac->rx_tti_sem_wait(mac) == 0);
    received(mac, &msg);
    CHECK(msg.msg_id == 3 && mac->rx_release(mac, &msg) == 0);
    await_byte(from_second);
    tell(to_second);
    succeeds(second);
    CHECK(mac->ipc_destroy(mac) == 0);
}

static int is_part(char **argv, const char *part, void (*run)(int commands, int replies))
{
    if (strcmp(argv[1], part) != 0)
        return 0;
    run(atoi(argv[2]), atoi(argv[3]));
    return 1;
}

int main(int argc, char **argv)
{
    begin();
    if (argc > 1) {
        CHECK(argc == 4);
        CHECK(is_part(argv, "greedy_secondary", greedy_secondary) || is_part(argv, "second_secondary", second_secondary) ||
              is_part(argv, "first_primary", first_primary) || is_part(argv, "second_primary", second_primary));
        return 0;
    }
    the_secondary_is_killed();
    the_primary_is_killed();
    return 0;
}
