/* Functions beside the instance. See nv_ipc.h. */
#ifndef NV_IPC_UTILS_H_INCLUDED_
#define NV_IPC_UTILS_H_INCLUDED_

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "nv_ipc.h"
#include "nvlog.h"
#ifdef __cplusplus
#include "nvlog.hpp"
#endif

#define LOG_TEMP_FILE_PATH "/var/log/aerial"

#if defined(__cplusplus)
extern "C" {
#endif

#define SFN_SLOT_INVALID 0xFFFFFFFF

typedef union
{
    uint32_t u32;
    struct
    {
        uint16_t sfn;
        uint16_t slot;
    } u16;
} sfn_slot_t;

/* The frame and slot of a message whose id is above 0x7F; SFN_SLOT_INVALID of others, and of NULL. */
sfn_slot_t nv_ipc_get_sfn_slot(nv_ipc_msg_t *msg);

/* Writes the second byte of msg_buf. */
void nv_ipc_set_handle_id(nv_ipc_msg_t *msg, uint8_t handle_id);

/* Nanoseconds of the real-time clock in NVIPC's layout; -1 on links of shmesh, which keep no time of sending. */
int64_t nv_ipc_get_ts_send(nv_ipc_t *ipc, nv_ipc_msg_t *msg);

/* Sends a message to this very endpoint. It is received before those of the other side. */
int nv_ipc_shm_send_loopback(nv_ipc_t *ipc, nv_ipc_msg_t *msg);

/* About how many messages wait to be received. */
int nv_ipc_shm_rx_poll(nv_ipc_t *ipc);

/*
 * Nothing is wiped when a secondary comes back. In NVIPC's layout the primary asks before it lets a further one in, in another
 * thread; a negative answer keeps it out. On links of shmesh it is never called. -1 for NULL.
 */
int nv_ipc_set_reset_callback(nv_ipc_t *ipc, int (*callback)(void *), void *cb_args);

/* 1 for the primary side, else 0. */
int is_module_primary(nv_ipc_module_t module_type);

/* What the primary configured; valid until ipc_destroy. A copy: of it only the filters are looked at, by nvipc_fw_start. */
nv_ipc_config_t *nv_ipc_get_primary_config(nv_ipc_t *ipc);

/* Fills in the configuration of a link that exists, without attaching to it. */
int nv_ipc_lookup_config(nv_ipc_config_t *cfg, const char *prefix, nv_ipc_module_t module_type);

/* Writes what is queued and held, or a configuration, to standard error. The link goes on. */
int nv_ipc_dump(nv_ipc_t *ipc);
int nv_ipc_dump_config(nv_ipc_config_t *cfg);

/* GPUs that this process sees; 0 without a driver. */
int cuda_get_device_count(void);
/* 1 for an address in a DATA part that is memory of a GPU, else 0. */
int cuda_is_device_pointer(const void *ptr);
/* 0 if pools of the host are locked for a GPU, else -1. */
int nv_ipc_check_host_pinned_memory(nv_ipc_t *ipc);

static inline int is_device_pointer(const void *ptr)
{
    return cuda_is_device_pointer(ptr);
}

#if defined(__cplusplus)
}
#endif

#endif
