/* Over datagrams: ids and lengths arrive, long messages are split, and the descriptor is the socket. */
#include "check.h"

#include <arpa/inet.h>

/* An address in the loopback network that no other test uses: it is made of the process's number. */
static void own_address(char *text)
{
    struct in_addr own = {htonl(0x7f000000u | (unsigned)getpid())};
    CHECK(inet_ntop(AF_INET, &own, text, NV_IPV4_STRING_LEN) != NULL);
}

static nv_ipc_t *udp(nv_ipc_module_t module, int local, int remote)
{
    nv_ipc_config_t cfg;
    cfg.ipc_transport = NV_IPC_TRANSPORT_UDP;
    CHECK(set_nv_ipc_default_config(&cfg, module) == 0);
    own_address(cfg.transport_config.udp.local_addr);
    own_address(cfg.transport_config.udp.remote_addr);
    cfg.transport_config.udp.local_port = local;
    cfg.transport_config.udp.remote_port = remote;
    nv_ipc_t *ipc = create_nv_ipc_interface(&cfg);
    CHECK(ipc != NULL);
    return ipc;
}

static void exchange(nv_ipc_t *from, nv_ipc_t *to, int i)
{
    nv_ipc_msg_t msg;
    memset(&msg, 0, sizeof(msg));
    msg.data_pool = i % 2 ? NV_IPC_MEMPOOL_CPU_DATA : -1;
    CHECK(from->tx_allocate(from, &msg, 0) == 0 && (msg.data_buf != NULL) == (i % 2));
    msg.msg_id = i;
    msg.cell_id = -i;
    msg.msg_len = i % 152 + 1;
    memset(msg.msg_buf, i, (size_t)msg.msg_len);
    if (msg.data_buf != NULL) {
        msg.data_len = i * 100;
        memset(msg.data_buf, i + 1, (size_t)msg.data_len);
    }
    int32_t data_len = msg.data_len;
    CHECK(from->tx_send_msg(from, &msg) == 0 && from->tx_tti_sem_post(from) == 0);
    /* A second send of the same message fails. */
    CHECK(from->tx_send_msg(from, &msg) == -1);
    while (to->rx_recv_msg(to, &msg) != 0) {
        if (i % 3 == 0) {
            CHECK(to->rx_tti_sem_wait(to) == 0);
        } else {
            struct pollfd ready = {.fd = to->get_fd(to), .events = POLLIN};
            CHECK(poll(&ready, 1, -1) == 1 && to->get_value(to) == 1);
        }
    }
    CHECK(msg.msg_id == i && msg.cell_id == -i && msg.msg_len == i % 152 + 1 && msg.data_len == data_len);
    CHECK(((unsigned char *)msg.msg_buf)[msg.msg_len - 1] == (unsigned char)i);
    for (int32_t at = 0; at < msg.data_len; at++)
        CHECK(((unsigned char *)msg.data_buf)[at] == (unsigned char)(i + 1));
    CHECK(to->rx_release(to, &msg) == 0 && to->rx_release(to, &msg) == -1);
}

int main(void)
{
    begin();
    nv_ipc_t *phy = udp(NV_IPC_MODULE_PHY, 20000, 20001), *mac = udp(NV_IPC_MODULE_MAC, 20001, 20000);
    for (int i = 0; i < 300; i++) {
        exchange(mac, phy, i);
        exchange(phy, mac, i);
    }
    nv_ipc_msg_t msg;
    memset(&msg, 0, sizeof(msg));
    CHECK(phy->tx_allocate(phy, &msg, 0) == 0);
    msg.msg_len = 153;
    CHECK(phy->tx_send_msg(phy, &msg) == -1 && nv_ipc_shm_send_loopback(phy, &msg) == -1);
    CHECK(phy->tx_release(phy, &msg) == 0 && nv_ipc_shm_rx_poll(phy) == -1);
    /* There is no tap, and waiting for one fails at once. */
    CHECK(nvipc_fw_start(phy, 0) == -1 && nvipc_fw_get_started(phy) == 0 && nvipc_fw_dequeue(phy, &msg) == -1);
    CHECK(nvipc_fw_sem_wait(phy) == -1);
    /* A port can have one endpoint only. */
    nv_ipc_config_t cfg;
    cfg.ipc_transport = NV_IPC_TRANSPORT_UDP;
    CHECK(set_nv_ipc_default_config(&cfg, NV_IPC_MODULE_PHY) == 0);
    own_address(cfg.transport_config.udp.local_addr);
    cfg.transport_config.udp.local_port = 20000;
    CHECK(create_nv_ipc_interface(&cfg) == NULL);
    CHECK(phy->ipc_destroy(phy) == 0 && mac->ipc_destroy(mac) == 0);
    return 0;
}
