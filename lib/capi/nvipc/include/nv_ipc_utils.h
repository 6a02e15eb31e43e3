/* Functions outside the function table of an instance. See nv_ipc.h. */
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

/* The frame and slot of a message with an id above 0x7F; SFN_SLOT_INVALID for other messages and for NULL. */
sfn_slot_t nv_ipc_get_sfn_slot(nv_ipc_msg_t *msg);

/* Writes the handle id, which is the second byte of msg_buf. */
void nv_ipc_set_handle_id(nv_ipc_msg_t *msg, uint8_t handle_id);

/* The time of sending in nanoseconds of the real-time clock, in NVIPC's layout. -1 on links of shmesh, which do not
 * record it. */
int64_t nv_ipc_get_ts_send(nv_ipc_t *ipc, nv_ipc_msg_t *msg);

/* Sends a message to this endpoint itself. It is received before messages of the other side. */
int nv_ipc_shm_send_loopback(nv_ipc_t *ipc, nv_ipc_msg_t *msg);

/* Approximate number of queued messages. */
int nv_ipc_shm_rx_poll(nv_ipc_t *ipc);

/*
 * Nothing is wiped when a secondary reconnects. In NVIPC's layout, the primary calls the callback in another thread before
 * it accepts a further secondary, and a negative result refuses it. On links of shmesh it is never called. -1 for NULL.
 */
int nv_ipc_set_reset_callback(nv_ipc_t *ipc, int (*callback)(void *), void *cb_args);

/* 1 for the primary side, else 0. */
int is_module_primary(nv_ipc_module_t module_type);

/* A copy of the primary's configuration, valid until ipc_destroy. Only its filters are read again, by nvipc_fw_start. */
nv_ipc_config_t *nv_ipc_get_primary_config(nv_ipc_t *ipc);

/* Reads the configuration of an existing link without attaching to it. */
int nv_ipc_lookup_config(nv_ipc_config_t *cfg, const char *prefix, nv_ipc_module_t module_type);

/* Write what is queued and held, or a configuration, to standard error. The link stays usable. */
int nv_ipc_dump(nv_ipc_t *ipc);
int nv_ipc_dump_config(nv_ipc_config_t *cfg);

/* Number of GPUs that this process sees; 0 without a driver. */
int cuda_get_device_count(void);
/* 1 for an address in a DATA part in GPU memory, else 0. */
int cuda_is_device_pointer(const void *ptr);
/* 0 if host pools are page-locked for a GPU, else -1. */
int nv_ipc_check_host_pinned_memory(nv_ipc_t *ipc);

static inline int is_device_pointer(const void *ptr)
{
    return cuda_is_device_pointer(ptr);
}

#if defined(__cplusplus)
}
#endif

#endif
