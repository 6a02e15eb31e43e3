//! Structures and constants of the interface. Their layout is the ABI that programs were compiled with.

use std::ffi::{c_char, c_int, c_void};

/// Bytes of a name with its NUL.
pub const NV_NAME_MAX_LEN: usize = 32;
/// Bytes of an IPv4 address as text, with its NUL.
pub const NV_IPV4_STRING_LEN: usize = 16;
/// Number of pools of a link.
pub const NV_IPC_MEMPOOL_NUM: usize = 5;
/// Number of message ids that the filters of a trace can name.
pub const NVIPC_MAX_MSG_ID: usize = 256;
/// Number of cell ids that they can name.
pub const NVIPC_MAX_CELL_ID: usize = 256;

/// The secondary side, by its use in a base station.
pub const NV_IPC_MODULE_MAC: c_int = 0;
/// The primary side, by its use in a base station.
pub const NV_IPC_MODULE_PHY: c_int = 1;
/// The side that attaches to the link.
pub const NV_IPC_MODULE_SECONDARY: c_int = 2;
/// The side that creates the link.
pub const NV_IPC_MODULE_PRIMARY: c_int = 3;
/// A process that only looks at a link.
pub const NV_IPC_MODULE_IPC_DUMP: c_int = 4;

/// Transport by UDP datagrams.
pub const NV_IPC_TRANSPORT_UDP: c_int = 0;
/// Transport by shared memory.
pub const NV_IPC_TRANSPORT_SHM: c_int = 1;
/// Transport by Ethernet with DPDK.
pub const NV_IPC_TRANSPORT_DPDK: c_int = 2;
/// Transport by PCIe with DOCA.
pub const NV_IPC_TRANSPORT_DOCA: c_int = 3;

/// A message: its fields and the addresses of its parts.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nv_ipc_msg_t {
    /// The message id, as the application defines it.
    pub msg_id: i32,
    /// The cell id, as the application defines it.
    pub cell_id: i32,
    /// Bytes of the MSG part.
    pub msg_len: i32,
    /// Bytes of the DATA part.
    pub data_len: i32,
    /// The pool of `data_buf`; 0 or less without a DATA part.
    pub data_pool: i32,
    /// Address of the MSG part.
    pub msg_buf: *mut c_void,
    /// Address of the DATA part, or NULL.
    pub data_buf: *mut c_void,
}

/// The size of a pool.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct nv_ipc_mempool_size_t {
    /// Size of a buffer in bytes.
    pub buf_size: i32,
    /// Number of its buffers.
    pub pool_len: i32,
}

/// Configuration of the UDP transport.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nv_ipc_config_udp_t {
    /// Port to listen on.
    pub local_port: c_int,
    /// Port to send to.
    pub remote_port: c_int,
    /// Address to listen on.
    pub local_addr: [c_char; NV_IPV4_STRING_LEN],
    /// Address to send to.
    pub remote_addr: [c_char; NV_IPV4_STRING_LEN],
    /// Bytes of a MSG part.
    pub msg_buf_size: i32,
    /// Bytes of a DATA part.
    pub data_buf_size: i32,
}

/// Configuration of the shared-memory transport.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nv_ipc_config_shm_t {
    /// The GPU of the device pools, or -1.
    pub cuda_device_id: c_int,
    /// Slots of a ring; at least the number of MSG buffers.
    pub ring_len: i32,
    /// Sizes of the pools, by id.
    pub mempool_size: [nv_ipc_mempool_size_t; NV_IPC_MEMPOOL_NUM],
    /// The name of the link.
    pub prefix: [c_char; NV_NAME_MAX_LEN],
}

/// Configuration of the DPDK transport.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nv_ipc_config_dpdk_t {
    /// Whether this side creates the link.
    pub primary: c_int,
    /// As for shared memory.
    pub cuda_device_id: c_int,
    /// Whether the library starts DPDK.
    pub need_eal_init: u16,
    /// The core that polls.
    pub lcore_id: u16,
    /// Maximum size of a frame in bytes.
    pub nic_mtu: u16,
    /// Sizes of the pools, by id.
    pub mempool_size: [nv_ipc_mempool_size_t; NV_IPC_MEMPOOL_NUM],
    /// The name of the instance.
    pub prefix: [c_char; NV_NAME_MAX_LEN],
    /// PCI address of the local network card.
    pub local_nic_pci: [c_char; NV_NAME_MAX_LEN],
    /// MAC address of the peer's network card.
    pub peer_nic_mac: [c_char; NV_NAME_MAX_LEN],
}

/// Configuration of the DOCA transport.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nv_ipc_config_doca_t {
    /// Whether this side creates the link.
    pub primary: c_int,
    /// As for shared memory.
    pub cuda_device_id: c_int,
    /// The core that polls.
    pub cpu_core: u16,
    /// Maximum size of a frame in bytes.
    pub nic_mtu: u16,
    /// Sizes of the pools, by id.
    pub mempool_size: [nv_ipc_mempool_size_t; NV_IPC_MEMPOOL_NUM],
    /// The name of the instance.
    pub prefix: [c_char; NV_NAME_MAX_LEN],
    /// PCI address of the host's card.
    pub host_pci: [c_char; NV_NAME_MAX_LEN],
    /// PCI address of the DPU's card.
    pub dpu_pci: [c_char; NV_NAME_MAX_LEN],
}

/// Configuration of tracing. Only `grpc_forward` and the filters have an effect.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nv_ipc_debug_config_t {
    /// Version of the layout.
    pub nvipc_version: i32,
    /// Where transport blocks are: 0 in MSG, 1 in DATA.
    pub fapi_tb_loc: i32,
    /// Number of messages to forward to the tap.
    pub grpc_forward: i32,
    /// Whether to record timestamps.
    pub debug_timing: i32,
    /// Whether to capture messages.
    pub pcap_enable: i32,
    /// How captured messages are saved.
    pub pcap_sync_save: i32,
    /// The core that captures.
    pub pcap_shm_caching_cpu_core: i32,
    /// The core that saves.
    pub pcap_file_saving_cpu_core: i32,
    /// Size of the capture buffer, as a power of 2.
    pub pcap_cache_size_bits: i32,
    /// Size of the capture file, as a power of 2.
    pub pcap_file_size_bits: i32,
    /// Maximum number of captured bytes of a MSG part.
    pub pcap_max_msg_size: i32,
    /// Maximum number of captured bytes of a DATA part.
    pub pcap_max_data_size: i32,
    /// For each message id, whether it is traced.
    pub msg_filter: [u8; NVIPC_MAX_MSG_ID],
    /// For each cell id, whether it is traced.
    pub cell_filter: [u8; NVIPC_MAX_CELL_ID],
}

/// The configuration of one transport.
#[repr(C)]
#[derive(Clone, Copy)]
pub union nv_ipc_transport_config_t {
    /// For the UDP transport.
    pub udp: nv_ipc_config_udp_t,
    /// For the shared-memory transport.
    pub shm: nv_ipc_config_shm_t,
    /// For the DPDK transport.
    pub dpdk: nv_ipc_config_dpdk_t,
    /// For the DOCA transport.
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
    /// One of `NV_IPC_MODULE_*`: the side.
    pub module_type: c_int,
    /// One of `NV_IPC_TRANSPORT_*`: the transport.
    pub ipc_transport: c_int,
    /// Configuration of that transport.
    pub transport_config: nv_ipc_transport_config_t,
    /// The configuration of tracing.
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
        // SAFETY: all fields are integers and arrays of integers.
        unsafe { std::mem::zeroed() }
    }
}

/// A function that only takes the instance.
pub type Plain = unsafe extern "C" fn(*mut nv_ipc_t) -> c_int;
/// A function that may wait, where the thread can be cancelled.
pub type WaitFn = unsafe extern "C-unwind" fn(*mut nv_ipc_t) -> c_int;
/// A function that takes a message.
pub type OnMsg = unsafe extern "C" fn(*mut nv_ipc_t, *mut nv_ipc_msg_t) -> c_int;
/// A function that allocates the buffers of a message.
pub type Allocate = unsafe extern "C" fn(*mut nv_ipc_t, *mut nv_ipc_msg_t, u32) -> c_int;
/// A function that copies: destination, source, number of bytes.
pub type Copy = unsafe extern "C" fn(*mut nv_ipc_t, *mut c_void, *const c_void, usize) -> c_int;

/// The function table of an instance, whose address identifies the instance.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nv_ipc_t {
    /// Destroys the instance and detaches.
    pub ipc_destroy: Plain,
    /// Allocates buffers to send.
    pub tx_allocate: Allocate,
    /// Releases buffers that were not sent.
    pub tx_release: OnMsg,
    /// Allocates buffers, as `tx_allocate` does.
    pub rx_allocate: Allocate,
    /// Releases a received message.
    pub rx_release: OnMsg,
    /// Sends one message to the peer.
    pub tx_send_msg: OnMsg,
    /// Wakes the other side.
    pub tx_tti_sem_post: Plain,
    /// Waits until the other side posts.
    pub rx_tti_sem_wait: WaitFn,
    /// Receives the oldest message.
    pub rx_recv_msg: OnMsg,
    /// The descriptor to add to epoll.
    pub get_fd: Plain,
    /// Wakes the other side.
    pub notify: unsafe extern "C" fn(*mut nv_ipc_t, c_int) -> c_int,
    /// Consumes one post without waiting.
    pub get_value: WaitFn,
    /// Copies from a CUDA pool.
    pub cuda_memcpy_to_host: Copy,
    /// Copies to a CUDA pool.
    pub cuda_memcpy_to_device: Copy,
    /// Copies from a GDRCopy pool.
    pub gdr_memcpy_to_host: Copy,
    /// Copies to a GDRCopy pool.
    pub gdr_memcpy_to_device: Copy,
}

/// The numbers of a frame and of a slot in it.
#[repr(C)]
#[derive(Clone, Copy)]
pub union sfn_slot_t {
    /// Both numbers in one word.
    pub u32: u32,
    /// The frame number, then the slot number.
    pub u16: [u16; 2],
}

impl std::fmt::Debug for sfn_slot_t {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // SAFETY: both fields of the union are integers over the same bytes.
        let whole = unsafe { self.u32 };
        write!(f, "{whole:#010x}")
    }
}

/// The same checks as `tests/layout.c` makes of the header.
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

/// A text in an array of C, cut to its size.
pub(crate) fn text<const N: usize>(value: &str) -> [c_char; N] {
    let mut out = [0; N];
    // The last byte stays NUL.
    for (to, from) in out[..N - 1].iter_mut().zip(value.bytes()) {
        *to = from.cast_signed() as c_char;
    }
    out
}
