/* Helpers of the test programs: checks that end the program, small links, and children. */
#ifndef CHECK_H
#define CHECK_H

#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "nv_ipc.h"
#include "nv_ipc_forward.h"
#include "nv_ipc_utils.h"

#define CHECK(so)                                                                   \
    do {                                                                            \
        if (!(so)) {                                                                \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #so);        \
            _exit(1);                                                               \
        }                                                                           \
    } while (0)

#include "../../tests/again.h"

static nv_ipc_config_t small(const char *name, nv_ipc_module_t module)
{
    nv_ipc_config_t cfg;
    memset(&cfg, 0xee, sizeof(cfg));
    cfg.ipc_transport = NV_IPC_TRANSPORT_SHM;
    CHECK(set_nv_ipc_default_config(&cfg, module) == 0);
    snprintf(cfg.transport_config.shm.prefix, NV_NAME_MAX_LEN, "%s", name);
    nv_ipc_mempool_size_t *size = cfg.transport_config.shm.mempool_size;
    size[NV_IPC_MEMPOOL_CPU_MSG] = (nv_ipc_mempool_size_t){512, 16};
    size[NV_IPC_MEMPOOL_CPU_DATA] = (nv_ipc_mempool_size_t){4096, 8};
    size[NV_IPC_MEMPOOL_CPU_LARGE] = (nv_ipc_mempool_size_t){65536, 4};
    cfg.transport_config.shm.ring_len = 16;
    return cfg;
}

static inline nv_ipc_t *opened(const char *name, nv_ipc_module_t module)
{
    nv_ipc_config_t cfg = small(name, module);
    nv_ipc_t *ipc = create_nv_ipc_interface(&cfg);
    CHECK(ipc != NULL);
    return ipc;
}

/* A missing GPU does not prevent a start, as in NVIPC: the device pools are in host memory then. */
static inline void falls_back(int gpu)
{
    nv_ipc_config_t cfg = small("fallback", NV_IPC_MODULE_PRIMARY);
    cfg.transport_config.shm.mempool_size[NV_IPC_MEMPOOL_CUDA_DATA] = (nv_ipc_mempool_size_t){4000, 4};
    cfg.transport_config.shm.cuda_device_id = gpu;
    nv_ipc_t *ipc = create_nv_ipc_interface(&cfg);
    CHECK(ipc != NULL);
    nv_ipc_msg_t msg;
    char text[8] = "";
    memset(&msg, 0, sizeof(msg));
    msg.data_pool = NV_IPC_MEMPOOL_CUDA_DATA;
    CHECK(ipc->tx_allocate(ipc, &msg, 0) == 0 && !is_device_pointer(msg.data_buf));
    CHECK(ipc->cuda_memcpy_to_device(ipc, msg.data_buf, "in CPU", 7) == 0 && memcmp(msg.data_buf, "in CPU", 7) == 0);
    CHECK(ipc->cuda_memcpy_to_host(ipc, text, msg.data_buf, 7) == 0 && strcmp(text, "in CPU") == 0);
    CHECK(ipc->cuda_memcpy_to_host(ipc, text, msg.data_buf, 4001) == -1);
    CHECK(ipc->cuda_memcpy_to_host(ipc, text, msg.msg_buf, 1) == -1);
    CHECK(ipc->tx_release(ipc, &msg) == 0 && ipc->ipc_destroy(ipc) == 0);
}

/* Sends a message of one byte in each part. With data_pool 0, it has no DATA. */
static inline int sent(nv_ipc_t *ipc, int32_t id, int32_t data_pool, unsigned char byte)
{
    nv_ipc_msg_t msg;
    memset(&msg, 0, sizeof(msg));
    msg.data_pool = data_pool;
    if (ipc->tx_allocate(ipc, &msg, 0) != 0)
        return -1;
    msg.msg_id = id;
    msg.cell_id = id + 1;
    msg.msg_len = 1;
    *(unsigned char *)msg.msg_buf = byte;
    if (msg.data_buf != NULL) {
        msg.data_len = 1;
        *(unsigned char *)msg.data_buf = byte;
    }
    if (ipc->tx_send_msg(ipc, &msg) == 0)
        return 0;
    CHECK(ipc->tx_release(ipc, &msg) == 0);
    return -1;
}

/* Wakes the other side. In NVIPC's layout, the descriptor of the peer may not have arrived yet. */
static inline void posted(nv_ipc_t *ipc)
{
    const char *layout = getenv("SHMESH_NVIPC_LAYOUT");
    while (ipc->tx_tti_sem_post(ipc) != 0) {
        CHECK(layout != NULL && strcmp(layout, "nvipc") == 0);
        sched_yield();
    }
}

/* Polls until there is a message. */
static inline void received(nv_ipc_t *ipc, nv_ipc_msg_t *msg)
{
    while (ipc->rx_recv_msg(ipc, msg) != 0)
        sched_yield();
}

static inline void tell(int fd)
{
    CHECK(write(fd, "!", 1) == 1);
}

static inline void await_byte(int fd)
{
    char byte;
    CHECK(read(fd, &byte, 1) == 1);
}

#endif
