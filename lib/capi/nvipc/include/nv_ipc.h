/*
 * The interface of NVIPC over links of shmesh. Programs written for NVIPC run after they are compiled with this header, or
 * relinked.
 *
 * Names, layouts and numbers equal those in NVIPC's releases 25-3 and 26-1. docs/nvipc.md describes everything else, with
 * each difference. No function ends the process: on failure it returns -1 or NULL, and writes a line to standard error.
 */
#ifndef NV_IPC_H_INCLUDED_
#define NV_IPC_H_INCLUDED_

#include <stddef.h>
#include <stdint.h>

/* Bytes of a name, and of an IPv4 address as text, each with its NUL. */
#define NV_NAME_MAX_LEN 32
#define NV_IPV4_STRING_LEN 16

/* Number of ids that the filters of a trace can name. */
#define NVIPC_MAX_MSG_ID (256)
#define NVIPC_MAX_CELL_ID (256)

/* The side of a link, with two names for each. The last value is for NVIPC's dump tool, and is refused here. */
typedef enum
{
    NV_IPC_MODULE_MAC = 0,
    NV_IPC_MODULE_PHY = 1,
    NV_IPC_MODULE_SECONDARY = 2,
    NV_IPC_MODULE_PRIMARY = 3,
    NV_IPC_MODULE_IPC_DUMP = 4,
    NV_IPC_MODULE_MAX = 5
} nv_ipc_module_t;

/* The transports. Shared memory and UDP are supported. */
typedef enum
{
    NV_IPC_TRANSPORT_UDP = 0,
    NV_IPC_TRANSPORT_SHM = 1,
    NV_IPC_TRANSPORT_DPDK = 2,
    NV_IPC_TRANSPORT_DOCA = 3,
    NV_IPC_TRANSPORT_MAX = 4
} nv_ipc_transport_t;

/* The pools. MSG parts are from the first, DATA parts from the others. The last two are in GPU memory. */
typedef enum
{
    NV_IPC_MEMPOOL_CPU_MSG = 0,
    NV_IPC_MEMPOOL_CPU_DATA = 1,
    NV_IPC_MEMPOOL_CPU_LARGE = 2,
    NV_IPC_MEMPOOL_CUDA_DATA = 3,
    NV_IPC_MEMPOOL_GPU_DATA = 4,
    NV_IPC_MEMPOOL_NUM = 5
} nv_ipc_mempool_id_t;

/* A message: a MSG part and optionally a DATA part. Without one, data_pool is 0 or less and data_buf is NULL. */
typedef struct
{
    int32_t msg_id;    /* the application's to choose */
    int32_t cell_id;   /* the application's to choose */
    int32_t msg_len;   /* bytes in msg_buf */
    int32_t data_len;  /* bytes in data_buf */
    int32_t data_pool; /* nv_ipc_mempool_id_t of data_buf */
    void *msg_buf;
    void *data_buf;
} nv_ipc_msg_t;

typedef struct
{
    int local_port;
    int remote_port;
    char local_addr[NV_IPV4_STRING_LEN];
    char remote_addr[NV_IPV4_STRING_LEN];
    int32_t msg_buf_size;
    int32_t data_buf_size;
} nv_ipc_config_udp_t;

/* The size of a pool. A pool with a buffer size or length of 0 does not exist. */
typedef struct
{
    int32_t buf_size; /* bytes of a buffer */
    int32_t pool_len; /* buffers */
} nv_ipc_mempool_size_t;

typedef struct
{
    int cuda_device_id; /* the GPU of cuda_data and gpu_data, for which the others are locked; -1: memory of the host instead */
    int32_t ring_len;   /* raised to the number of MSG buffers, so that a send never finds the ring full */
    nv_ipc_mempool_size_t mempool_size[NV_IPC_MEMPOOL_NUM];
    char prefix[NV_NAME_MAX_LEN]; /* the name of the link */
} nv_ipc_config_shm_t;

typedef struct
{
    int primary;
    int cuda_device_id;
    uint16_t need_eal_init;
    uint16_t lcore_id;
    uint16_t nic_mtu;
    nv_ipc_mempool_size_t mempool_size[NV_IPC_MEMPOOL_NUM];
    char prefix[NV_NAME_MAX_LEN];
    char local_nic_pci[NV_NAME_MAX_LEN];
    char peer_nic_mac[NV_NAME_MAX_LEN];
} nv_ipc_config_dpdk_t;

typedef struct
{
    int primary;
    int cuda_device_id;
    uint16_t cpu_core;
    uint16_t nic_mtu;
    nv_ipc_mempool_size_t mempool_size[NV_IPC_MEMPOOL_NUM];
    char prefix[NV_NAME_MAX_LEN];
    char host_pci[NV_NAME_MAX_LEN];
    char dpu_pci[NV_NAME_MAX_LEN];
} nv_ipc_config_doca_t;

/* Tracing. Only grpc_forward and the filters have an effect: see nv_ipc_forward.h. */
typedef struct
{
    int32_t nvipc_version;
    int32_t fapi_tb_loc;
    int32_t grpc_forward; /* -1: the tap is started with the instance; 2 and more: for so many messages */
    int32_t debug_timing;
    int32_t pcap_enable;
    int32_t pcap_sync_save;
    int32_t pcap_shm_caching_cpu_core;
    int32_t pcap_file_saving_cpu_core;
    int32_t pcap_cache_size_bits;
    int32_t pcap_file_size_bits;
    int32_t pcap_max_msg_size;
    int32_t pcap_max_data_size;
    uint8_t msg_filter[NVIPC_MAX_MSG_ID];
    uint8_t cell_filter[NVIPC_MAX_CELL_ID];
} nv_ipc_debug_config_t;

typedef struct
{
    nv_ipc_module_t module_type;
    nv_ipc_transport_t ipc_transport;
    union
    {
        nv_ipc_config_udp_t udp;
        nv_ipc_config_shm_t shm;
        nv_ipc_config_dpdk_t dpdk;
        nv_ipc_config_doca_t doca;
    } transport_config;
    nv_ipc_debug_config_t debug_configs;
} nv_ipc_config_t;

/*
 * An instance: one endpoint of a link. Any thread may call any function at any time, including ipc_destroy. Functions
 * return 0, or -1 on failure, unless stated otherwise. A message must be passed as it was allocated or received: with
 * another address in msg_buf or data_buf, or another pool, the call fails.
 */
typedef struct nv_ipc_t nv_ipc_t;
struct nv_ipc_t
{
    /* Detaches from the link. Calls that wait return -1. All buffers are invalid afterwards. */
    int (*ipc_destroy)(nv_ipc_t *ipc);

    /* Allocates a MSG buffer, and a DATA buffer if data_pool is 1 to 4. -1 at once if none is free. Buffers are not
     * cleared. */
    int (*tx_allocate)(nv_ipc_t *ipc, nv_ipc_msg_t *msg, uint32_t options);
    /* Releases buffers that were allocated and not sent. */
    int (*tx_release)(nv_ipc_t *ipc, nv_ipc_msg_t *msg);

    /* As the two above. Each received message must be released or sent. */
    int (*rx_allocate)(nv_ipc_t *ipc, nv_ipc_msg_t *msg, uint32_t options);
    int (*rx_release)(nv_ipc_t *ipc, nv_ipc_msg_t *msg);

    /* Sends a message. Never waits. After 0 the receiver owns the buffers; after -1 the sender still does. */
    int (*tx_send_msg)(nv_ipc_t *ipc, nv_ipc_msg_t *msg);

    /* Wakes the other side once. Posts are counted. Send the messages of a slot, then post. */
    int (*tx_tti_sem_post)(nv_ipc_t *ipc);
    /* Waits for a post of the other side and consumes it. Then receive until there is no message. */
    int (*rx_tti_sem_wait)(nv_ipc_t *ipc);

    /* Receives the oldest message; -1 if there is none. Never waits. */
    int (*rx_recv_msg)(nv_ipc_t *ipc, nv_ipc_msg_t *msg);

    /* A descriptor for select, poll and epoll, readable after each post from now on. Do not read or close it. */
    int (*get_fd)(nv_ipc_t *ipc);
    /* As tx_tti_sem_post; value is ignored. */
    int (*notify)(nv_ipc_t *ipc, int value);
    /* As rx_tti_sem_wait, but returns 1. Call it each time the descriptor is readable. */
    int (*get_value)(nv_ipc_t *ipc);

    /* Copy between host memory and data_buf of cuda_data or gpu_data, or a part of it, and return when the copy is
     * complete. -1 for other addresses. They do not wait for other work on the GPU. */
    int (*cuda_memcpy_to_host)(nv_ipc_t *ipc, void *host, const void *device, size_t size);
    int (*cuda_memcpy_to_device)(nv_ipc_t *ipc, void *device, const void *host, size_t size);
    int (*gdr_memcpy_to_host)(nv_ipc_t *ipc, void *host, const void *device, size_t size);
    int (*gdr_memcpy_to_device)(nv_ipc_t *ipc, void *device, const void *host, size_t size);
};

#if defined(__cplusplus)
extern "C" {
#endif

/* Sets the defaults of the transport in cfg->ipc_transport. */
int set_nv_ipc_default_config(nv_ipc_config_t *cfg, nv_ipc_module_t module_type);

/* Reads the first link of a YAML file, in NVIPC's form or shmesh's. After -1, cfg is unchanged. */
int load_nv_ipc_yaml_config(nv_ipc_config_t *cfg, const char *yaml_path, nv_ipc_module_t module_type);

/*
 * Creates an instance. The primary creates the link, or adopts it as the last primary left it. The secondary waits for the
 * link (at most SHMESH_NVIPC_TIMEOUT_S seconds, if that is set), takes only the prefix from cfg, and fills in the rest.
 * With SHMESH_NVIPC_LAYOUT=nvipc the peer may be NVIPC itself. A forked child must create its own instances. NULL on
 * failure.
 */
nv_ipc_t *create_nv_ipc_interface(nv_ipc_config_t *cfg);

/* The instance with this name; with NULL, the oldest one. NULL if there is none. */
nv_ipc_t *nv_ipc_get_instance(const char *prefix);

/* Size in bytes and number of a pool's buffers in cfg. -1 for a pool or transport that does not exist. */
int nv_ipc_get_buf_size(const nv_ipc_config_t *cfg, nv_ipc_mempool_id_t pool_id);
int nv_ipc_get_pool_len(const nv_ipc_config_t *cfg, nv_ipc_mempool_id_t pool_id);

#if defined(__cplusplus)
}
#endif

#endif
