/* Checks the header against the layout that programs were compiled with, as C and as C++. The library checks its own
 * types. */
#include <assert.h>
#include <stddef.h>

#include "nv_ipc.h"
#include "nv_ipc_forward.h"
#include "nv_ipc_utils.h"

#define AT(type, member, offset) static_assert(offsetof(type, member) == (offset), #type "." #member)
#define BYTES(type, size) static_assert(sizeof(type) == (size), #type)

BYTES(nv_ipc_module_t, 4);
BYTES(nv_ipc_transport_t, 4);
BYTES(sfn_slot_t, 4);

BYTES(nv_ipc_msg_t, 40);
AT(nv_ipc_msg_t, msg_id, 0);
AT(nv_ipc_msg_t, cell_id, 4);
AT(nv_ipc_msg_t, msg_len, 8);
AT(nv_ipc_msg_t, data_len, 12);
AT(nv_ipc_msg_t, data_pool, 16);
AT(nv_ipc_msg_t, msg_buf, 24);
AT(nv_ipc_msg_t, data_buf, 32);

BYTES(nv_ipc_config_udp_t, 48);
AT(nv_ipc_config_udp_t, remote_addr, 24);
AT(nv_ipc_config_udp_t, data_buf_size, 44);
BYTES(nv_ipc_mempool_size_t, 8);
BYTES(nv_ipc_config_shm_t, 80);
AT(nv_ipc_config_shm_t, ring_len, 4);
AT(nv_ipc_config_shm_t, mempool_size, 8);
AT(nv_ipc_config_shm_t, prefix, 48);
BYTES(nv_ipc_config_dpdk_t, 152);
AT(nv_ipc_config_dpdk_t, need_eal_init, 8);
AT(nv_ipc_config_dpdk_t, mempool_size, 16);
AT(nv_ipc_config_dpdk_t, prefix, 56);
AT(nv_ipc_config_dpdk_t, peer_nic_mac, 120);
BYTES(nv_ipc_config_doca_t, 148);
AT(nv_ipc_config_doca_t, mempool_size, 12);
AT(nv_ipc_config_doca_t, prefix, 52);
AT(nv_ipc_config_doca_t, dpu_pci, 116);
BYTES(nv_ipc_debug_config_t, 560);
AT(nv_ipc_debug_config_t, fapi_tb_loc, 4);
AT(nv_ipc_debug_config_t, pcap_max_data_size, 44);
AT(nv_ipc_debug_config_t, msg_filter, 48);
AT(nv_ipc_debug_config_t, cell_filter, 304);
BYTES(nv_ipc_config_t, 720);
AT(nv_ipc_config_t, ipc_transport, 4);
AT(nv_ipc_config_t, transport_config, 8);
AT(nv_ipc_config_t, debug_configs, 160);

BYTES(nv_ipc_t, 128);
AT(nv_ipc_t, ipc_destroy, 0);
AT(nv_ipc_t, tx_allocate, 8);
AT(nv_ipc_t, tx_release, 16);
AT(nv_ipc_t, rx_allocate, 24);
AT(nv_ipc_t, rx_release, 32);
AT(nv_ipc_t, tx_send_msg, 40);
AT(nv_ipc_t, tx_tti_sem_post, 48);
AT(nv_ipc_t, rx_tti_sem_wait, 56);
AT(nv_ipc_t, rx_recv_msg, 64);
AT(nv_ipc_t, get_fd, 72);
AT(nv_ipc_t, notify, 80);
AT(nv_ipc_t, get_value, 88);
AT(nv_ipc_t, cuda_memcpy_to_host, 96);
AT(nv_ipc_t, cuda_memcpy_to_device, 104);
AT(nv_ipc_t, gdr_memcpy_to_host, 112);
AT(nv_ipc_t, gdr_memcpy_to_device, 120);

/* The functions that the library refers to by number have the order of the header. */
int main(void)
{
    nv_ipc_config_t cfg;
    cfg.ipc_transport = NV_IPC_TRANSPORT_SHM;
    if (set_nv_ipc_default_config(&cfg, NV_IPC_MODULE_PRIMARY) != 0)
        return 1;
    if (nv_ipc_get_buf_size(&cfg, NV_IPC_MEMPOOL_CPU_LARGE) != 4096000)
        return 2;
    if (nv_ipc_get_pool_len(&cfg, NV_IPC_MEMPOOL_CPU_MSG) != 4096)
        return 3;
    return is_module_primary(NV_IPC_MODULE_PHY) == 1 && is_module_primary(NV_IPC_MODULE_MAC) == 0 ? 0 : 4;
}
