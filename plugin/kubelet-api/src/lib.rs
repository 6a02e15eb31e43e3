//! Clients and servers of the kubelet's gRPC interfaces, without logic.
//!
//! | module | interface | served by |
//! |---|---|---|
//! | [`deviceplugin`] | `Registration` | the kubelet, at [`KUBELET_SOCKET`] in [`DEVICE_PLUGINS_DIR`] |
//! | | `DevicePlugin` | a device plugin, at a socket in the same directory |
//! | [`dra`] | `DRAPlugin`, `v1` | a driver of dynamic resource allocation, at the socket that its registration names |
//! | [`dra_v1beta1`] | `DRAPlugin`, `v1beta1` | the same driver, for kubelets before 1.34 |
//! | [`drahealth`] | `DRAResourceHealth` | the same driver, at the same socket |
//! | [`pluginregistration`] | `Registration` | a plugin, at a socket in [`PLUGINS_REGISTRY_DIR`] |
//! | [`podresources`] | `PodResourcesLister` | the kubelet, at [`POD_RESOURCES_SOCKET`] |
//!
//! `build.rs` generates them from `proto`, without `protoc`.
//!
//! Clients and servers are generic over the transport. With tonic's `transport` feature, use `Endpoint::connect_with_connector`
//! and `Server::serve_with_incoming` for unix sockets.

/// The version of the device plugin interface that kubelets since 1.10 speak.
pub const API_VERSION: &str = "v1beta1";

/// The [`deviceplugin::Device::health`] of a device that may be allocated; with any other text it may not.
pub const HEALTHY: &str = "Healthy";

/// The conventional [`deviceplugin::Device::health`] of a device that is not [`HEALTHY`].
pub const UNHEALTHY: &str = "Unhealthy";

/// Directory of the sockets of the kubelet and of device plugins.
pub const DEVICE_PLUGINS_DIR: &str = "/var/lib/kubelet/device-plugins";

/// File name of the kubelet's own socket in [`DEVICE_PLUGINS_DIR`].
pub const KUBELET_SOCKET: &str = "kubelet.sock";

/// Directory that the kubelet watches for sockets of plugins.
pub const PLUGINS_REGISTRY_DIR: &str = "/var/lib/kubelet/plugins_registry";

/// [`pluginregistration::PluginInfo::type`](pluginregistration::PluginInfo) of a device plugin.
pub const DEVICE_PLUGIN_TYPE: &str = "DevicePlugin";

/// [`pluginregistration::PluginInfo::type`](pluginregistration::PluginInfo) of a driver of dynamic resource allocation.
pub const DRA_PLUGIN_TYPE: &str = "DRAPlugin";

/// The supported version by which a driver announces [`dra`].
pub const DRA_V1: &str = "v1.DRAPlugin";

/// The supported version by which a driver announces [`dra_v1beta1`].
pub const DRA_V1BETA1: &str = "v1beta1.DRAPlugin";

/// The supported version by which a driver announces [`drahealth`].
pub const DRA_HEALTH_V1ALPHA1: &str = "v1alpha1.DRAResourceHealth";

/// Socket on which the kubelet lists the devices of pods.
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
            include!(concat!(env!("OUT_DIR"), "/", $file));
        }
    };
}

generated! {
    /// The device plugin interface, `v1beta1`: registration and allocation.
    deviceplugin, "v1beta1.rs"
}
generated! {
    /// The interface of drivers of dynamic resource allocation, `v1`.
    dra, "k8s.io.kubelet.pkg.apis.dra.v1.rs"
}
generated! {
    /// The interface of drivers of dynamic resource allocation, `v1beta1`.
    dra_v1beta1, "k8s.io.kubelet.pkg.apis.dra.v1beta1.rs"
}
generated! {
    /// The health of devices of dynamic resource allocation, `v1alpha1`.
    drahealth, "v1alpha1.rs"
}
generated! {
    /// The plugin registration interface, `v1`, for plugins that the kubelet discovers.
    pluginregistration, "pluginregistration.rs"
}
generated! {
    /// The pod resources interface, `v1`: devices held by pods.
    podresources, "v1.rs"
}
