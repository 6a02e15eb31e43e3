//! A driver whose one device gives containers an environment variable, by a CDI device that exists on the node.

use std::env::var;
use std::sync::Arc;

use k8s_openapi::api::resource::v1::{Device, ResourceClaim};
use kubelet_dra::{ClaimRef, Driver, DriverSettings, PreparedDevice, SlicePublisher, serve};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

struct Hello;

impl Driver for Hello {
    async fn prepare(&self, _: Arc<ResourceClaim>) -> Result<Vec<PreparedDevice>, String> {
        let (pool, device) = (var("NODE_NAME").map_err(|error| error.to_string())?, "hello".into());
        let cdi_devices = vec!["example.com/hello=all".into()];
        Ok(vec![PreparedDevice { pool, device, cdi_devices, ..PreparedDevice::default() }])
    }

    async fn unprepare(&self, _: ClaimRef) -> Result<(), String> {
        Ok(())
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let settings = DriverSettings {
        driver: "hello.example.com".into(),
        node: var("NODE_NAME")?,
        instance: var("POD_UID")?,
        plugins_dir: "/var/lib/kubelet/plugins".into(),
        registry_dir: "/var/lib/kubelet/plugins_registry".into(),
    };
    let client = kube::Client::try_default().await?;
    let stop = CancellationToken::new();
    let (_devices, list) = watch::channel(vec![Device { name: "hello".into(), ..Device::default() }]);
    tokio::spawn(SlicePublisher::new(client.clone(), &settings).run(list, stop.clone()));
    let (_health, health) = watch::channel(Vec::new());
    Ok(serve(settings, client, Arc::new(Hello), health, stop).await?)
}
