//! One device plugin, as the kubelet calls it.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use shmesh_kubelet_api::deviceplugin::device_plugin_client::DevicePluginClient;
use shmesh_kubelet_api::deviceplugin::{
    AllocateRequest, AllocateResponse, ContainerAllocateRequest, ContainerPreferredAllocationRequest,
    DevicePluginOptions, Empty, ListAndWatchResponse, PreferredAllocationRequest,
};
use tonic::Streaming;

use crate::clock::Clock;
use crate::process::Process;
use crate::wire::{Authority, Channel, GoError, MESSAGE_BYTES_MAX, dial};

const DIAL_LIMIT: Duration = Duration::from_secs(10);

/// A registered plugin: its resource, its socket, and the connection once there is one.
#[derive(Debug)]
pub(crate) struct Plugin {
    pub(crate) resource: String,
    pub(crate) socket: PathBuf,
    channel: Mutex<Option<Channel>>,
}

impl Plugin {
    pub(crate) fn new(resource: &str, socket: &Path) -> Self {
        Self { resource: resource.to_owned(), socket: socket.to_owned(), channel: Mutex::default() }
    }

    /// Connects to the plugin, or returns the reason for the failure.
    pub(crate) async fn connect(&self, clock: &Clock, process: &Process) -> Result<(), String> {
        let channel = dial(&self.socket, &Authority::localhost(), DIAL_LIMIT, clock, process)
            .await
            .map_err(|error| format!("failed to dial device plugin: {error}"))?;
        *self.channel.lock().unwrap_or_else(PoisonError::into_inner) = Some(channel);
        Ok(())
    }

    /// Closes the connection, and with it every call on it.
    pub(crate) fn close(&self) {
        if let Some(channel) = &*self.channel.lock().unwrap_or_else(PoisonError::into_inner) {
            channel.close();
        }
    }

    fn api(&self) -> Result<(DevicePluginClient<Channel>, Channel), GoError> {
        let channel = self.channel.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let channel = channel.ok_or_else(GoError::closing)?;
        let api = DevicePluginClient::new(channel.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX);
        Ok((api, channel))
    }

    pub(crate) async fn options(&self) -> Result<DevicePluginOptions, GoError> {
        let (mut api, _) = self.api()?;
        let answer = api.get_device_plugin_options(Empty {}).await;
        Ok(answer.map_err(|status| GoError::of(&status))?.into_inner())
    }

    pub(crate) async fn list_and_watch(&self) -> Result<Lists, GoError> {
        let (mut api, channel) = self.api()?;
        let answer = api.list_and_watch(Empty {}).await;
        Ok(Lists { stream: answer.map_err(|status| GoError::of(&status))?.into_inner(), channel })
    }

    pub(crate) async fn preferred(
        &self,
        available_device_ids: Vec<String>,
        must_include_device_ids: Vec<String>,
        allocation_size: i32,
    ) -> Result<Option<Vec<String>>, GoError> {
        let (mut api, _) = self.api()?;
        let request = ContainerPreferredAllocationRequest {
            available_device_ids,
            must_include_device_ids,
            allocation_size,
        };
        let request = PreferredAllocationRequest { container_requests: vec![request] };
        let answer = api.get_preferred_allocation(request).await.map_err(|status| GoError::of(&status))?;
        Ok(answer.into_inner().container_responses.into_iter().next().map(|answer| answer.device_ids))
    }

    pub(crate) async fn allocate(&self, devices_ids: Vec<String>) -> Result<AllocateResponse, GoError> {
        let (mut api, _) = self.api()?;
        let request = AllocateRequest { container_requests: vec![ContainerAllocateRequest { devices_ids }] };
        Ok(api.allocate(request).await.map_err(|status| GoError::of(&status))?.into_inner())
    }
}

/// The stream of ListAndWatch.
#[derive(Debug)]
pub(crate) struct Lists {
    stream: Streaming<ListAndWatchResponse>,
    channel: Channel,
}

impl Lists {
    /// Returns the next list, or the reason why the stream has ended.
    pub(crate) async fn next(&mut self) -> Result<ListAndWatchResponse, String> {
        tokio::select! {
            biased;
            () = self.channel.closed() => Err(GoError::closing().to_string()),
            list = self.stream.message() => match list {
                Ok(Some(list)) => Ok(list),
                Ok(None) => Err("EOF".to_owned()),
                Err(status) => Err(GoError::of(&status).to_string()),
            },
        }
    }
}
