//! Claims of the API server.

use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::{Api, Client};

use crate::api_error::text_of;

/// Maximum number of levels of objects and lists in the JSON of a claim, which is the limit of `serde_json`.
const MAX_LEVELS: usize = 127;

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
            if nests_too_deeply(&error) {
                return format!(
                    "claim {namespace}/{name} cannot be read: its JSON nests more than {MAX_LEVELS} levels; create it again with \
                     parameters in spec.devices.config, its own or its DeviceClass's, that nest less"
                );
            }
            format!("claim {namespace}/{name} cannot be read from the API server: {}", text_of(&error))
        })
    }
}

/// Whether an answer of the API server nests more than `serde_json` reads, which has no code for this error.
fn nests_too_deeply(error: &kube::Error) -> bool {
    matches!(error, kube::Error::SerdeError(error) if error.to_string().starts_with("recursion limit exceeded"))
}
