/* NVIPC's eventfds, implemented by a link: get_fd, notify and get_value of nv_ipc_t. */
#ifndef NV_IPC_EFD_H_INCLUDED_
#define NV_IPC_EFD_H_INCLUDED_

#include "nv_ipc.h"

#if defined(__cplusplus)
extern "C" {
#endif

#define NV_UNIX_SOCKET_PATH_MAX_LEN 108
#define NV_EFD_NAME_MAX_LEN 32

typedef struct nv_ipc_efd_t nv_ipc_efd_t;
struct nv_ipc_efd_t
{
    int (*get_fd)(nv_ipc_efd_t *ipc_efd);
    int (*notify)(nv_ipc_efd_t *ipc_efd, int value);
    int (*get_value)(nv_ipc_efd_t *ipc_efd);
    int (*close)(nv_ipc_efd_t *ipc_efd);
};

/* A link without DATA and with the name `<prefix>_efd`, of which only these four functions are used. NULL on failure. */
nv_ipc_efd_t *nv_ipc_efd_open(int primary, const char *prefix);

#if defined(__cplusplus)
}
#endif

#endif
