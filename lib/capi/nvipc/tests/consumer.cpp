/* A C++ program with NVIPC's headers alone. Its YAML tree is its own, or with HAS_LIBYAML that of a file. */
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "nv_ipc.hpp"

#define CHECK(so)                                                                                   \
    do {                                                                                            \
        if (!(so)) {                                                                                \
            NVLOGE_FMT(NVLOG_TAG_BASE_NVIPC, AERIAL_NVIPC_API_EVENT, "not so: " #so);               \
            return 1;                                                                               \
        }                                                                                           \
    } while (0)

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    NVLOGC_FMT(NVLOG_TAG_BASE_NVIPC, "a file of {}", "NVIPC's form");
    yaml::file_parser parser(argv[1]);
    yaml::document document = parser.next_document();
    yaml::node root = document.root();
    yaml::node transport = root["transport"];
    nv_ipc_config_t cfg;
    CHECK(nv_ipc_parse_yaml_node(&cfg, &transport, NV_IPC_MODULE_PRIMARY) == 0);
    const nv_ipc_config_shm_t &shm = cfg.transport_config.shm;
    CHECK(cfg.ipc_transport == NV_IPC_TRANSPORT_SHM && cfg.module_type == NV_IPC_MODULE_PRIMARY);
    CHECK(std::string(shm.prefix) == "from-a-tree" && shm.cuda_device_id == -1 && shm.ring_len == 4096);
    CHECK(nv_ipc_get_buf_size(&cfg, NV_IPC_MEMPOOL_CPU_MSG) == 15000);
    CHECK(nv_ipc_get_pool_len(&cfg, NV_IPC_MEMPOOL_CPU_DATA) == 16);
    CHECK(cfg.debug_configs.msg_filter[0x80] == 1 && cfg.debug_configs.msg_filter[0x81] == 0);
    CHECK(nv_ipc_parse_yaml_node(&cfg, nullptr, NV_IPC_MODULE_PRIMARY) == -1);
    return 0;
}
