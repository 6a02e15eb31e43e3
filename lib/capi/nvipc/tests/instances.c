/* Several instances in one process, and the functions outside the function table. */
#include "check.h"

static int callback(void *args)
{
    (void)args;
    return 0;
}

static void by_name(void)
{
    CHECK(nv_ipc_get_instance(NULL) == NULL && nv_ipc_get_instance("one") == NULL);
    nv_ipc_t *one = opened("one", NV_IPC_MODULE_PRIMARY), *two = opened("two", NV_IPC_MODULE_PHY);
    CHECK(one != two && nv_ipc_get_instance("one") == one && nv_ipc_get_instance("two") == two);
    CHECK(nv_ipc_get_instance(NULL) == one && nv_ipc_get_instance("three") == NULL && nv_ipc_get_instance("") == NULL);

    /* Messages of one link do not reach the other. */
    nv_ipc_t *of_one = opened("one", NV_IPC_MODULE_SECONDARY), *of_two = opened("two", NV_IPC_MODULE_MAC);
    CHECK(nv_ipc_get_instance("one") == one);
    nv_ipc_msg_t msg;
    CHECK(sent(of_one, 1, 0, 11) == 0 && sent(of_two, 2, 0, 22) == 0);
    CHECK(one->rx_recv_msg(one, &msg) == 0 && msg.msg_id == 1 && *(char *)msg.msg_buf == 11);
    /* A buffer of one link does not belong to the other. */
    CHECK(two->rx_release(two, &msg) == -1 && one->rx_release(one, &msg) == 0);
    CHECK(one->rx_recv_msg(one, &msg) == -1);
    CHECK(two->rx_recv_msg(two, &msg) == 0 && msg.msg_id == 2 && two->rx_release(two, &msg) == 0);

    CHECK(one->ipc_destroy(one) == 0 && nv_ipc_get_instance("one") == of_one);
    CHECK(of_one->ipc_destroy(of_one) == 0 && nv_ipc_get_instance("one") == NULL);
    CHECK(nv_ipc_get_instance(NULL) == two);
    CHECK(of_two->ipc_destroy(of_two) == 0 && two->ipc_destroy(two) == 0);
}

static void as_many_as_there_can_be(void)
{
    nv_ipc_t *all[64];
    char name[16];
    for (int i = 0; i < 64; i++) {
        snprintf(name, sizeof(name), "many%d", i);
        all[i] = opened(name, NV_IPC_MODULE_PRIMARY);
    }
    nv_ipc_config_t cfg = small("toomany", NV_IPC_MODULE_PRIMARY);
    CHECK(create_nv_ipc_interface(&cfg) == NULL);
    for (int i = 0; i < 64; i++)
        CHECK(all[i]->ipc_destroy(all[i]) == 0);
    /* Many times over. Stale pointers are detected. */
    nv_ipc_t *last = NULL;
    for (int i = 0; i < 100; i++) {
        nv_ipc_t *next = opened("again", NV_IPC_MODULE_PRIMARY);
        CHECK(next != last && (last == NULL || last->ipc_destroy(last) == -1));
        CHECK(next->ipc_destroy(next) == 0);
        last = next;
    }
}

static void configuration_of_the_link(nv_ipc_t *mac)
{
    nv_ipc_config_t cfg, *primary = nv_ipc_get_primary_config(mac);
    CHECK(primary != NULL && primary->module_type == NV_IPC_MODULE_PRIMARY);
    CHECK(nv_ipc_get_pool_len(primary, NV_IPC_MEMPOOL_CPU_DATA) == 8);
    memset(&cfg, 0xee, sizeof(cfg));
    CHECK(nv_ipc_lookup_config(&cfg, "helpers", NV_IPC_MODULE_SECONDARY) == 0);
    CHECK(cfg.module_type == NV_IPC_MODULE_SECONDARY && cfg.ipc_transport == NV_IPC_TRANSPORT_SHM);
    CHECK(strcmp(cfg.transport_config.shm.prefix, "helpers") == 0);
    CHECK(nv_ipc_get_buf_size(&cfg, NV_IPC_MEMPOOL_CPU_LARGE) == 65536);
    CHECK(nv_ipc_get_pool_len(&cfg, NV_IPC_MEMPOOL_CPU_LARGE) == 4);
    CHECK(nv_ipc_get_pool_len(&cfg, NV_IPC_MEMPOOL_CUDA_DATA) == 0);
}

static void headers(nv_ipc_t *mac)
{
    nv_ipc_msg_t msg;
    memset(&msg, 0, sizeof(msg));
    CHECK(mac->tx_allocate(mac, &msg, 0) == 0);
    static const unsigned char fapi[] = {1, 0, 0x82, 0, 4, 0, 0, 0, 0x34, 0x02, 0x09, 0x00};
    memcpy(msg.msg_buf, fapi, sizeof(fapi));
    nv_ipc_set_handle_id(&msg, 5);
    CHECK(((unsigned char *)msg.msg_buf)[1] == 5);
    msg.msg_id = 0x82;
    CHECK(nv_ipc_get_sfn_slot(&msg).u16.sfn == 0x234 && nv_ipc_get_sfn_slot(&msg).u16.slot == 9);
    msg.msg_id = 0x7f;
    CHECK(nv_ipc_get_sfn_slot(&msg).u32 == SFN_SLOT_INVALID);
    CHECK(nv_ipc_get_ts_send(mac, &msg) == -1);
    CHECK(mac->tx_release(mac, &msg) == 0);
}

static void loopback(nv_ipc_t *phy, nv_ipc_t *mac)
{
    nv_ipc_msg_t msg, got;
    memset(&msg, 0, sizeof(msg));
    msg.data_pool = NV_IPC_MEMPOOL_CPU_DATA;
    CHECK(phy->tx_allocate(phy, &msg, 0) == 0);
    msg.msg_id = 9;
    msg.msg_len = 3;
    msg.data_len = 5;
    memcpy(msg.msg_buf, "abc", 3);
    memcpy(msg.data_buf, "defgh", 5);
    msg.msg_len = 513;
    CHECK(nv_ipc_shm_send_loopback(phy, &msg) == -1);
    msg.msg_len = 3;
    CHECK(nv_ipc_shm_rx_poll(phy) == 0 && nv_ipc_shm_send_loopback(phy, &msg) == 0);
    CHECK(nv_ipc_shm_rx_poll(phy) == 1 && mac->rx_recv_msg(mac, &got) == -1);
    /* A message that was sent no longer belongs to the sender. */
    CHECK(phy->tx_release(phy, &msg) == -1 && phy->tx_send_msg(phy, &msg) == -1);
    CHECK(phy->rx_recv_msg(phy, &got) == 0 && got.msg_id == 9 && got.msg_len == 3 && got.data_len == 5);
    CHECK(memcmp(got.msg_buf, "abc", 3) == 0 && memcmp(got.data_buf, "defgh", 5) == 0);
    CHECK(phy->rx_release(phy, &got) == 0 && nv_ipc_shm_rx_poll(phy) == 0);
}

/* A received message can be sent. */
static void sent_back(nv_ipc_t *phy, nv_ipc_t *mac)
{
    nv_ipc_msg_t msg;
    CHECK(sent(mac, 3, NV_IPC_MEMPOOL_CPU_LARGE, 77) == 0 && phy->rx_recv_msg(phy, &msg) == 0);
    *(char *)msg.msg_buf = 78;
    msg.msg_id = 4;
    CHECK(phy->tx_send_msg(phy, &msg) == 0 && phy->rx_release(phy, &msg) == -1);
    CHECK(mac->rx_recv_msg(mac, &msg) == 0 && msg.msg_id == 4 && msg.data_len == 1);
    CHECK(msg.data_pool == NV_IPC_MEMPOOL_CPU_LARGE && *(char *)msg.msg_buf == 78 && *(char *)msg.data_buf == 77);
    CHECK(mac->rx_release(mac, &msg) == 0);
}

/* With every buffer in use, nothing is lost, and all are released. */
static void exhaustion(nv_ipc_t *phy, nv_ipc_t *mac)
{
    for (int round = 0; round < 3; round++) {
        int count = 0;
        while (sent(mac, count, count < 8 ? NV_IPC_MEMPOOL_CPU_DATA : 0, 1) == 0)
            count++;
        CHECK(count == 16 && nv_ipc_shm_rx_poll(phy) == 16);
        nv_ipc_msg_t none;
        memset(&none, 0, sizeof(none));
        CHECK(phy->tx_allocate(phy, &none, 0) == -1);
        for (int i = 0; i < count; i++) {
            nv_ipc_msg_t msg;
            CHECK(phy->rx_recv_msg(phy, &msg) == 0 && msg.msg_id == i && phy->rx_release(phy, &msg) == 0);
        }
        /* No DATA buffer is left, but MSG buffers are: then the MSG buffer is released. */
        nv_ipc_msg_t data[4];
        for (int i = 0; i < 4; i++) {
            memset(&data[i], 0, sizeof(data[i]));
            data[i].data_pool = NV_IPC_MEMPOOL_CPU_LARGE;
            CHECK(mac->tx_allocate(mac, &data[i], 0) == 0);
        }
        for (int i = 0; i < 40; i++) {
            none.data_pool = NV_IPC_MEMPOOL_CPU_LARGE;
            CHECK(mac->tx_allocate(mac, &none, 0) == -1 && none.msg_buf == NULL);
        }
        for (int i = 0; i < 4; i++)
            CHECK(mac->tx_release(mac, &data[i]) == 0);
    }
}

int main(void)
{
    begin();
    by_name();
    as_many_as_there_can_be();
    nv_ipc_t *phy = opened("helpers", NV_IPC_MODULE_PRIMARY), *mac = opened("helpers", NV_IPC_MODULE_SECONDARY);
    configuration_of_the_link(mac);
    headers(mac);
    loopback(phy, mac);
    sent_back(phy, mac);
    exhaustion(phy, mac);
    CHECK(nv_ipc_set_reset_callback(phy, callback, NULL) == 0);
    CHECK(nv_ipc_check_host_pinned_memory(phy) == -1);
    CHECK(sent(mac, 1, 0, 1) == 0 && nv_ipc_dump(phy) == 0);
    /* The link stays usable. */
    nv_ipc_msg_t msg;
    CHECK(phy->rx_recv_msg(phy, &msg) == 0 && phy->rx_release(phy, &msg) == 0);
    CHECK(mac->ipc_destroy(mac) == 0 && phy->ipc_destroy(phy) == 0);
    return 0;
}
