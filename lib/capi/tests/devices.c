/* A message whose DATA part is in memory of a device, by a sender that uses the interface of NVIPC. */
#include "check.h"

#include "nv_ipc.h"

int main(void)
{
    begin();
    nv_ipc_config_t cfg;
    memset(&cfg, 0, sizeof(cfg));
    cfg.ipc_transport = NV_IPC_TRANSPORT_SHM;
    CHECK(set_nv_ipc_default_config(&cfg, NV_IPC_MODULE_PRIMARY) == 0);
    snprintf(cfg.transport_config.shm.prefix, NV_NAME_MAX_LEN, "devices");
    nv_ipc_mempool_size_t *size = cfg.transport_config.shm.mempool_size;
    memset(size, 0, sizeof(cfg.transport_config.shm.mempool_size));
    size[NV_IPC_MEMPOOL_CPU_MSG].buf_size = 512;
    size[NV_IPC_MEMPOOL_CPU_MSG].pool_len = 4;
    size[NV_IPC_MEMPOOL_CUDA_DATA].buf_size = 4096;
    size[NV_IPC_MEMPOOL_CUDA_DATA].pool_len = 2;
    nv_ipc_t *phy = create_nv_ipc_interface(&cfg);
    CHECK(phy != NULL);
    shmesh_link_t *mac;
    CHECK(shmesh_link_attach("devices", SHMESH_SECONDARY, NULL, &mac) == SHMESH_OK);

    for (int i = 0; i < 10; i++) {
        nv_ipc_msg_t msg;
        memset(&msg, 0, sizeof(msg));
        msg.data_pool = NV_IPC_MEMPOOL_CUDA_DATA;
        CHECK(phy->tx_allocate(phy, &msg, 0) == 0 && msg.data_buf != NULL);
        msg.msg_id = i;
        msg.msg_len = 3;
        msg.data_len = 100;
        memcpy(msg.msg_buf, "abc", 3);
        CHECK(phy->tx_send_msg(phy, &msg) == 0);
        shmesh_message_t got;
        CHECK(shmesh_link_receive(mac, &got) == SHMESH_OK);
        CHECK(got.msg_id == i && got.msg_len == 3 && memcmp(got.msg, "abc", 3) == 0);
        CHECK(got.data_pool == SHMESH_CUDA_DATA && got.data == NULL && got.data_len == 0);
        CHECK(shmesh_message_release(&got) == SHMESH_OK);

        shmesh_loan_t loan;
        CHECK(shmesh_link_loan(mac, SHMESH_CUDA_DATA, &loan) == SHMESH_ERROR_NO_POOL);
        CHECK(shmesh_loan_drop(&loan) == SHMESH_ERROR_ENDED);
    }
    CHECK(shmesh_link_close(mac) == SHMESH_OK);
    CHECK(phy->ipc_destroy(phy) == 0);
    return 0;
}
