//! Claims of the API server.

use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::{Api, Client};

use crate::api_error::text_of;

/// Where claims are read from: the API server, through a [`Client`].
pub trait Claims: Send + Sync + 'static {
    /// Returns the claim of this name, or `None` if there is none.
    fn get(
        &self,
        namespace: &str,
        name: &str,
    ) -> impl Future<Output = Result<Option<ResourceClaim>, String>> + Send;
}

impl Claims for Client {
    async fn get(&self, namespace: &str, name: &str) -> Result<Option<ResourceClaim>, String> {
        let api: Api<ResourceClaim> = Api::namespaced(self.clone(), namespace);
        let found = api.get_opt(name).await;
        found.map_err(|error| {
            format!("claim {namespace}/{name} cannot be read from the API server: {}", text_of(&error))
        })
    }
}
