//! The backend for UDP, with a peer on another node.

use std::ffi::c_int;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use shmesh_nvipc_wire::udp::{Config, Endpoint, Form};
use shmesh_sys::cancel::Uncancelled;

use super::wire::{allocated, failed, given, named, taken};
use super::{Backend, Buffers, Failure, Fields, PollSleep, PoolId, ReceivedMessage, Result};

/// An endpoint that sends and receives datagrams.
#[derive(Debug)]
pub struct UdpBackend(Endpoint);

impl UdpBackend {
    /// Listens at `local` and sends to `remote`. `sizes` are the buffer sizes; 0 means no DATA.
    ///
    /// # Errors
    /// If the port is taken, or a size is invalid.
    pub fn open(local: SocketAddr, remote: SocketAddr, sizes: (u32, u32), theirs: bool) -> Result<Self> {
        let mut local = local;
        // NVIPC listens at all addresses, whatever its configuration says. With its default address, no other node could be
        // reached.
        if local.ip().is_loopback() && !remote.ip().is_loopback() {
            local.set_ip(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        }
        let mut config = Config::new(local, remote);
        config.pools[PoolId::CpuMsg.index()].buf_size_bytes = sizes.0;
        config.pools[PoolId::CpuData.index()].buf_size_bytes = sizes.1;
        config.form = if theirs { Form::Nvipc } else { Form::Shmesh };
        Ok(Self(Endpoint::open(config).map_err(failed)?))
    }
}

fn not_here(what: &str) -> Failure {
    Failure::Refused(format!("{what} is not available over UDP; use NV_IPC_TRANSPORT_SHM"))
}

impl Backend for UdpBackend {
    fn pool(&self, pool: PoolId) -> Option<(u32, u32)> {
        let size = self.0.pool(pool);
        size.is_enabled().then_some((size.buf_size_bytes, size.pool_len))
    }

    fn ring_len(&self) -> u32 {
        self.0.pool(PoolId::CpuMsg).pool_len
    }

    fn allocate(&self, data: Option<PoolId>) -> Result<Buffers> {
        allocated(self.0.allocate(data).map_err(failed)?)
    }

    fn send(&self, fields: Fields, msg: NonNull<u8>, data: Option<NonNull<u8>>) -> Result<()> {
        let _uncancelled = Uncancelled::new();
        self.0.send(given(fields, msg, data)).map_err(failed)
    }

    fn send_loopback(&self, _: Fields, _: NonNull<u8>, _: Option<NonNull<u8>>) -> Result<()> {
        Err(not_here("loopback"))
    }

    fn receive(&self) -> Result<Option<ReceivedMessage>> {
        let _uncancelled = Uncancelled::new();
        self.0.receive().map_err(failed)?.map(taken).transpose()
    }

    fn release(&self, msg: NonNull<u8>, data: Option<NonNull<u8>>, pool: Option<PoolId>) -> Result<()> {
        self.0.release(named(msg, data, pool)).map_err(failed)
    }

    /// Does nothing: a datagram wakes the receiver.
    fn post(&self) -> Result<()> {
        self.0.notify().map_err(failed)
    }

    /// Whether a datagram has arrived. It is not consumed.
    fn take(&self) -> Result<bool> {
        self.0.wait(Some(Duration::ZERO)).map_err(failed)
    }

    /// Consumes nothing: the descriptor stays readable until the datagrams are received.
    fn take_signal(&self) -> Result<bool> {
        self.0.notify().map(|()| true).map_err(failed)
    }

    fn sleep(self: Arc<Self>) -> Result<Option<PollSleep>> {
        let fds = self.0.waits_on().map(|fd| fd.as_raw_fd());
        Ok(Some(PollSleep { fds, guard: Box::new(self) }))
    }

    fn fd(&self) -> Result<c_int> {
        Ok(self.0.fd().as_raw_fd())
    }

    fn queued(&self) -> Result<usize> {
        Err(not_here("the number of queued messages"))
    }

    fn sent_at(&self, _msg: NonNull<u8>) -> Result<i64> {
        Err(not_here("the time of sending"))
    }

    fn close(&self) {
        self.0.close();
    }
}
