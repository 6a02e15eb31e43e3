//! The kubelet's gRPC interfaces, both sides of each, with no logic.
//!
//! | module | interface | who serves it |
//! |---|---|---|
//! | [`deviceplugin`] | `Registration` | the kubelet, at [`KUBELET_SOCKET`] in [`DEVICE_PLUGINS_DIR`] |
//! | | `DevicePlugin` | a device plugin, at a socket in the same directory |
//! | [`pluginregistration`] | `Registration` | a plugin, at a socket in [`PLUGINS_REGISTRY_DIR`] |
//! | [`podresources`] | `PodResourcesLister` | the kubelet, at [`POD_RESOURCES_SOCKET`] |
//!
//! The Rust in `src/generated` is checked in, so that nobody needs `protoc`. `tests/suite` makes it again from
//! `proto/` in memory; where they differ it repairs the file and fails once.
//!
//! Clients and servers are generic over the transport. With tonic's `transport` feature, a channel over a unix socket is made
//! with `Endpoint::connect_with_connector`, a server with `Server::serve_with_incoming`.
//!
//! ```
//! use shmesh_kubelet_api::deviceplugin::{Device, ListAndWatchResponse, RegisterRequest};
//! use shmesh_kubelet_api::{API_VERSION, HEALTHY};
//!
//! let announce = RegisterRequest {
//!     version: API_VERSION.to_owned(),
//!     endpoint: "shm.sock".to_owned(),
//!     resource_name: "shmesh.io/shm".to_owned(),
//!     options: None,
//! };
//! let unit = Device { id: "u0".to_owned(), health: HEALTHY.to_owned(), topology: None };
//! let list = ListAndWatchResponse { devices: vec![unit] };
//! assert_eq!((announce.version.as_str(), list.devices.len()), ("v1beta1", 1));
//! ```

/// The version of the device plugin interface that kubelets since 1.10 speak.
///
/// ```
/// assert_eq!(shmesh_kubelet_api::API_VERSION, "v1beta1");
/// ```
pub const API_VERSION: &str = "v1beta1";

/// [`deviceplugin::Device::health`] of a device that may be handed out; any other text means that it may not.
///
/// ```
/// assert_ne!(shmesh_kubelet_api::HEALTHY, shmesh_kubelet_api::UNHEALTHY);
/// ```
pub const HEALTHY: &str = "Healthy";

/// What plugins by custom say of a device that is not [`HEALTHY`].
///
/// ```
/// assert_eq!(shmesh_kubelet_api::UNHEALTHY, "Unhealthy");
/// ```
pub const UNHEALTHY: &str = "Unhealthy";

/// Where the kubelet and device plugins have their sockets.
///
/// ```
/// assert!(shmesh_kubelet_api::DEVICE_PLUGINS_DIR.starts_with("/var/lib/kubelet/"));
/// ```
pub const DEVICE_PLUGINS_DIR: &str = "/var/lib/kubelet/device-plugins";

/// File name of the kubelet's own socket in [`DEVICE_PLUGINS_DIR`].
///
/// ```
/// assert_eq!(shmesh_kubelet_api::KUBELET_SOCKET, "kubelet.sock");
/// ```
pub const KUBELET_SOCKET: &str = "kubelet.sock";

/// The directory that the kubelet watches for sockets of plugins.
///
/// ```
/// assert!(shmesh_kubelet_api::PLUGINS_REGISTRY_DIR.starts_with("/var/lib/kubelet/"));
/// ```
pub const PLUGINS_REGISTRY_DIR: &str = "/var/lib/kubelet/plugins_registry";

/// [`pluginregistration::PluginInfo::type`](pluginregistration::PluginInfo) of a device plugin.
///
/// ```
/// assert_eq!(shmesh_kubelet_api::DEVICE_PLUGIN_TYPE, "DevicePlugin");
/// ```
pub const DEVICE_PLUGIN_TYPE: &str = "DevicePlugin";

/// Where the kubelet says which pod has which device.
///
/// ```
/// assert!(shmesh_kubelet_api::POD_RESOURCES_SOCKET.starts_with("/var/lib/kubelet/"));
/// ```
pub const POD_RESOURCES_SOCKET: &str = "/var/lib/kubelet/pod-resources/kubelet.sock";

macro_rules! generated {
    ($(#[$doc:meta])* $name:ident, $file:literal) => {
        $(#[$doc])*
        #[allow(
            clippy::all,
            missing_docs,
            missing_debug_implementations,
            unused_qualifications,
            unreachable_pub,
            clippy::allow_attributes_without_reason,
            reason = "generated"
        )]
        pub mod $name {
            include!(concat!("generated/", $file));
        }
    };
}

generated! {
    /// Device plugins, `v1beta1`: what they announce, and what the kubelet asks of them.
    deviceplugin, "v1beta1.rs"
}
generated! {
    /// Plugins that are found by their socket, instead of announcing themselves.
    pluginregistration, "pluginregistration.rs"
}
generated! {
    /// Which pods have which resources, `v1`.
    podresources, "v1.rs"
}
