//! Structures and constants of the interface. Their layout is the ABI: programs were compiled with it.

use std::ffi::{c_char, c_int, c_void};

/// Bytes of a name with its NUL.
pub const NV_NAME_MAX_LEN: usize = 32;
/// Bytes of an IPv4 address as text, with its NUL.
pub const NV_IPV4_STRING_LEN: usize = 16;
/// Pools.
pub const NV_IPC_MEMPOOL_NUM: usize = 5;
/// Message ids, and cell ids, that the filters of a trace know.
pub const NVIPC_MAX_MSG_ID: usize = 256;
/// Cell ids that they know.
pub const NVIPC_MAX_CELL_ID: usize = 256;
/// The version of NVIPC's own layout, of the releases 25-3 and 26-1.
pub const NVIPC_LAYOUT_VERSION: i32 = 2530;

/// The secondary side, by its use in a base station.
pub const NV_IPC_MODULE_MAC: c_int = 0;
/// The primary side, by its use in a base station.
pub const NV_IPC_MODULE_PHY: c_int = 1;
/// The side that attaches.
pub const NV_IPC_MODULE_SECONDARY: c_int = 2;
/// The side that creates.
pub const NV_IPC_MODULE_PRIMARY: c_int = 3;
/// Who only looks.
pub const NV_IPC_MODULE_IPC_DUMP: c_int = 4;

/// Datagrams.
pub const NV_IPC_TRANSPORT_UDP: c_int = 0;
/// Shared memory.
pub const NV_IPC_TRANSPORT_SHM: c_int = 1;
/// Ethernet by DPDK.
pub const NV_IPC_TRANSPORT_DPDK: c_int = 2;
/// PCIe by DOCA.
pub const NV_IPC_TRANSPORT_DOCA: c_int = 3;

/// A message: where its parts are, and what it says of itself.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nv_ipc_msg_t {
    /// The application's to choose.
    pub msg_id: i32,
    /// The application's to choose.
    pub cell_id: i32,
    /// Bytes in `msg_buf`.
    pub msg_len: i32,
    /// Bytes in `data_buf`.
    pub data_len: i32,
    /// The pool of `data_buf`; 0 or less when there is none.
    pub data_pool: i32,
    /// The MSG part.
    pub msg_buf: *mut c_void,
    /// The DATA part, or NULL.
    pub data_buf: *mut c_void,
}

/// The size of a pool.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct nv_ipc_mempool_size_t {
    /// Bytes of a buffer.
    pub buf_size: i32,
    /// Buffers.
    pub pool_len: i32,
}

/// Datagrams.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nv_ipc_config_udp_t {
    /// Where to listen.
    pub local_port: c_int,
    /// Where to send.
    pub remote_port: c_int,
    /// Where to listen.
    pub local_addr: [c_char; NV_IPV4_STRING_LEN],
    /// Where to send.
    pub remote_addr: [c_char; NV_IPV4_STRING_LEN],
    /// Bytes of a MSG part.
    pub msg_buf_size: i32,
    /// Bytes of a DATA part.
    pub data_buf_size: i32,
}

/// Shared memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nv_ipc_config_shm_t {
    /// The GPU of the device pools; -1 for none.
    pub cuda_device_id: c_int,
    /// Slots of a ring; never fewer than there are MSG buffers.
    pub ring_len: i32,
    /// The pools, by id.
    pub mempool_size: [nv_ipc_mempool_size_t; NV_IPC_MEMPOOL_NUM],
    /// The name of the link.
    pub prefix: [c_char; NV_NAME_MAX_LEN],
}

/// Ethernet by DPDK.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nv_ipc_config_dpdk_t {
    /// Whether this side creates.
    pub primary: c_int,
    /// As for shared memory.
    pub cuda_device_id: c_int,
    /// Whether the library starts DPDK.
    pub need_eal_init: u16,
    /// Where it polls.
    pub lcore_id: u16,
    /// Bytes of a frame.
    pub nic_mtu: u16,
    /// The pools, by id.
    pub mempool_size: [nv_ipc_mempool_size_t; NV_IPC_MEMPOOL_NUM],
    /// The name of the instance.
    pub prefix: [c_char; NV_NAME_MAX_LEN],
    /// The network card here.
    pub local_nic_pci: [c_char; NV_NAME_MAX_LEN],
    /// The network card there.
    pub peer_nic_mac: [c_char; NV_NAME_MAX_LEN],
}

/// PCIe by DOCA.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nv_ipc_config_doca_t {
    /// Whether this side creates.
    pub primary: c_int,
    /// As for shared memory.
    pub cuda_device_id: c_int,
    /// Where it polls.
    pub cpu_core: u16,
    /// Bytes of a frame.
    pub nic_mtu: u16,
    /// The pools, by id.
    pub mempool_size: [nv_ipc_mempool_size_t; NV_IPC_MEMPOOL_NUM],
    /// The name of the instance.
    pub prefix: [c_char; NV_NAME_MAX_LEN],
    /// The card of the host.
    pub host_pci: [c_char; NV_NAME_MAX_LEN],
    /// The card of the DPU.
    pub dpu_pci: [c_char; NV_NAME_MAX_LEN],
}

/// Tracing. Nothing of it has an effect here.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nv_ipc_debug_config_t {
    /// Of the layout.
    pub nvipc_version: i32,
    /// Where transport blocks travel: 0 in MSG, 1 in DATA.
    pub fapi_tb_loc: i32,
    /// Messages to forward.
    pub grpc_forward: i32,
    /// Whether to take times.
    pub debug_timing: i32,
    /// Whether to capture.
    pub pcap_enable: i32,
    /// Who captures.
    pub pcap_sync_save: i32,
    /// Where it does.
    pub pcap_shm_caching_cpu_core: i32,
    /// Where it saves.
    pub pcap_file_saving_cpu_core: i32,
    /// Binary logarithm of bytes.
    pub pcap_cache_size_bits: i32,
    /// Binary logarithm of bytes.
    pub pcap_file_size_bits: i32,
    /// Bytes of a MSG part.
    pub pcap_max_msg_size: i32,
    /// Bytes of a DATA part.
    pub pcap_max_data_size: i32,
    /// By message id, whether it is traced.
    pub msg_filter: [u8; NVIPC_MAX_MSG_ID],
    /// By cell id, whether it is traced.
    pub cell_filter: [u8; NVIPC_MAX_CELL_ID],
}

/// The configuration of one transport.
#[repr(C)]
#[derive(Clone, Copy)]
pub union nv_ipc_transport_config_t {
    /// Datagrams.
    pub udp: nv_ipc_config_udp_t,
    /// Shared memory.
    pub shm: nv_ipc_config_shm_t,
    /// Ethernet by DPDK.
    pub dpdk: nv_ipc_config_dpdk_t,
    /// PCIe by DOCA.
    pub doca: nv_ipc_config_doca_t,
}

impl std::fmt::Debug for nv_ipc_transport_config_t {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("nv_ipc_transport_config_t")
    }
}

/// The configuration of an instance.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nv_ipc_config_t {
    /// Which side.
    pub module_type: c_int,
    /// Which transport.
    pub ipc_transport: c_int,
    /// How it is made.
    pub transport_config: nv_ipc_transport_config_t,
    /// Tracing.
    pub debug_configs: nv_ipc_debug_config_t,
}

impl std::fmt::Debug for nv_ipc_config_t {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("nv_ipc_config_t")
            .field("module_type", &self.module_type)
            .field("ipc_transport", &self.ipc_transport)
            .finish_non_exhaustive()
    }
}

impl nv_ipc_config_t {
    /// All zero, which is a valid value of every field.
    #[must_use]
    pub const fn zeroed() -> Self {
        // SAFETY: integers and arrays of them.
        unsafe { std::mem::zeroed() }
    }
}

/// A function that takes the instance alone.
pub type Plain = unsafe extern "C" fn(*mut nv_ipc_t) -> c_int;
/// Here a thread may be cancelled.
pub type Waiting = unsafe extern "C-unwind" fn(*mut nv_ipc_t) -> c_int;
/// A function that takes a message.
pub type OnMsg = unsafe extern "C" fn(*mut nv_ipc_t, *mut nv_ipc_msg_t) -> c_int;
/// A function that fills a message.
pub type Allocate = unsafe extern "C" fn(*mut nv_ipc_t, *mut nv_ipc_msg_t, u32) -> c_int;
/// A function that copies: where to, where from, how much.
pub type Copy = unsafe extern "C" fn(*mut nv_ipc_t, *mut c_void, *const c_void, usize) -> c_int;

/// The functions of an instance; an instance is a pointer to them.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nv_ipc_t {
    /// Ends it.
    pub ipc_destroy: Plain,
    /// Takes buffers.
    pub tx_allocate: Allocate,
    /// Gives them back.
    pub tx_release: OnMsg,
    /// Takes buffers.
    pub rx_allocate: Allocate,
    /// Gives back what was received.
    pub rx_release: OnMsg,
    /// Sends.
    pub tx_send_msg: OnMsg,
    /// Wakes the other side.
    pub tx_tti_sem_post: Plain,
    /// Sleeps until it wakes us.
    pub rx_tti_sem_wait: Waiting,
    /// Receives.
    pub rx_recv_msg: OnMsg,
    /// What to give to epoll.
    pub get_fd: Plain,
    /// Wakes the other side.
    pub notify: unsafe extern "C" fn(*mut nv_ipc_t, c_int) -> c_int,
    /// Takes one wake-up.
    pub get_value: Waiting,
    /// From a CUDA pool.
    pub cuda_memcpy_to_host: Copy,
    /// To a CUDA pool.
    pub cuda_memcpy_to_device: Copy,
    /// From a GDRCopy pool.
    pub gdr_memcpy_to_host: Copy,
    /// To a GDRCopy pool.
    pub gdr_memcpy_to_device: Copy,
}

/// A frame and a slot of it.
#[repr(C)]
#[derive(Clone, Copy)]
pub union sfn_slot_t {
    /// Both.
    pub u32: u32,
    /// The frame, then the slot.
    pub u16: [u16; 2],
}

impl std::fmt::Debug for sfn_slot_t {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // SAFETY: both are integers of the same bytes.
        let whole = unsafe { self.u32 };
        write!(f, "{whole:#010x}")
    }
}

/// As `tests/layout.c` says it of the header.
const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<nv_ipc_msg_t>() == 40);
    assert!(offset_of!(nv_ipc_msg_t, data_pool) == 16 && offset_of!(nv_ipc_msg_t, msg_buf) == 24);
    assert!(offset_of!(nv_ipc_msg_t, data_buf) == 32);
    assert!(size_of::<nv_ipc_t>() == 128 && offset_of!(nv_ipc_t, gdr_memcpy_to_device) == 120);
    assert!(offset_of!(nv_ipc_t, rx_recv_msg) == 64 && offset_of!(nv_ipc_t, get_value) == 88);
    assert!(size_of::<nv_ipc_config_udp_t>() == 48 && offset_of!(nv_ipc_config_udp_t, msg_buf_size) == 40);
    assert!(size_of::<nv_ipc_config_shm_t>() == 80);
    assert!(offset_of!(nv_ipc_config_shm_t, mempool_size) == 8);
    assert!(offset_of!(nv_ipc_config_shm_t, prefix) == 48);
    assert!(size_of::<nv_ipc_config_dpdk_t>() == 152);
    assert!(offset_of!(nv_ipc_config_dpdk_t, mempool_size) == 16);
    assert!(offset_of!(nv_ipc_config_dpdk_t, prefix) == 56);
    assert!(size_of::<nv_ipc_config_doca_t>() == 148);
    assert!(offset_of!(nv_ipc_config_doca_t, mempool_size) == 12);
    assert!(size_of::<nv_ipc_debug_config_t>() == 560);
    assert!(offset_of!(nv_ipc_debug_config_t, msg_filter) == 48);
    assert!(size_of::<nv_ipc_config_t>() == 720);
    assert!(offset_of!(nv_ipc_config_t, transport_config) == 8);
    assert!(offset_of!(nv_ipc_config_t, debug_configs) == 160);
    assert!(size_of::<sfn_slot_t>() == 4);
};
