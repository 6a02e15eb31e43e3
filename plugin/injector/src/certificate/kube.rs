//! The replicas' certificate store in a cluster: a Secret, and the webhook configuration.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Api, ObjectMeta, PostParams};
use kube::{Client, Error};

use super::{Bundle, CertStore, StoredCert};

/// Keys of the Secret; the first three match cert-manager.
const KEYS: [&str; 4] = ["ca.crt", "tls.crt", "tls.key", "terms.json"];

/// Stores the certificate in a Secret and its authorities in the `caBundle` of every webhook of one
/// configuration.
///
/// Requires `get` and `update` on both by name, and `create` on Secrets unless an empty Secret exists.
#[derive(Clone)]
pub struct KubeStore {
    secrets: Api<Secret>,
    webhooks: Api<MutatingWebhookConfiguration>,
    secret: String,
    webhook: String,
}

impl std::fmt::Debug for KubeStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KubeStore").field("secret", &self.secret).field("webhook", &self.webhook).finish()
    }
}

impl KubeStore {
    /// Creates a store for the objects with these names.
    #[must_use]
    pub fn new(client: Client, namespace: &str, secret: &str, webhook: &str) -> Self {
        Self {
            secrets: Api::namespaced(client.clone(), namespace),
            webhooks: Api::all(client),
            secret: secret.to_owned(),
            webhook: webhook.to_owned(),
        }
    }
}

/// Whether the API server reports a concurrent change.
fn is_conflict(error: &Error) -> bool {
    matches!(error, Error::Api(status) if status.code == 409)
}

fn bundle_of(secret: &Secret) -> Option<Bundle> {
    let text = |key: &str| String::from_utf8(secret.data.as_ref()?.get(key)?.0.clone()).ok();
    let [authorities, certificate, key, terms] = KEYS;
    Some(Bundle {
        authorities: text(authorities)?,
        certificate: text(certificate)?,
        key: text(key)?,
        terms: serde_json::from_str(&text(terms)?).ok()?,
    })
}

fn data_of(bundle: &Bundle) -> Result<BTreeMap<String, ByteString>> {
    let terms = serde_json::to_string(&bundle.terms)?;
    let values = [&bundle.authorities, &bundle.certificate, &bundle.key, &terms];
    Ok(KEYS
        .into_iter()
        .zip(values)
        .map(|(key, value)| (key.to_owned(), ByteString(value.clone().into())))
        .collect())
}

impl CertStore for KubeStore {
    async fn read(&self) -> Result<StoredCert> {
        let name = &self.secret;
        let secret =
            self.secrets.get_opt(name).await.with_context(|| format!("cannot read secret {name}"))?;
        Ok(match secret {
            None => StoredCert::default(),
            Some(secret) => {
                StoredCert { bundle: bundle_of(&secret), version: secret.metadata.resource_version }
            }
        })
    }

    async fn write(&self, found: &StoredCert, bundle: &Bundle) -> Result<bool> {
        let name = &self.secret;
        let mut secret = match &found.version {
            None => Secret { type_: Some("kubernetes.io/tls".into()), ..Secret::default() },
            // Keeps the type and labels of the existing Secret.
            Some(_) => self.secrets.get(name).await.with_context(|| format!("cannot read secret {name}"))?,
        };
        secret.data = Some(data_of(bundle)?);
        let written = match &found.version {
            None => {
                secret.metadata = ObjectMeta { name: Some(name.clone()), ..ObjectMeta::default() };
                self.secrets.create(&PostParams::default(), &secret).await
            }
            Some(version) => {
                secret.metadata.resource_version = Some(version.clone());
                self.secrets.replace(name, &PostParams::default(), &secret).await
            }
        };
        match written {
            Ok(_) => Ok(true),
            Err(error) if is_conflict(&error) => Ok(false),
            Err(error) => Err(error).with_context(|| format!("cannot write secret {name}")),
        }
    }

    async fn publish(&self, authorities: &str) -> Result<bool> {
        let name = &self.webhook;
        let named = || format!("cannot set the caBundle of webhook configuration {name}");
        let mut configuration = self.webhooks.get(name).await.with_context(named)?;
        let bundle = ByteString(authorities.as_bytes().to_vec());
        let mut changed = false;
        for webhook in configuration.webhooks.iter_mut().flatten() {
            if webhook.client_config.ca_bundle.as_ref() != Some(&bundle) {
                webhook.client_config.ca_bundle = Some(bundle.clone());
                changed = true;
            }
        }
        if changed {
            // Sent with the resource version that was read, so that concurrent changes are not overwritten.
            self.webhooks.replace(name, &PostParams::default(), &configuration).await.with_context(named)?;
        }
        Ok(changed)
    }
}
