//! A device key works only for the admitted process or service account. The wrong pods have the same key, user and pool.

use anyhow::{Result, bail};

use crate::pods;

use super::Setup;

pub(super) async fn run(setup: &Setup<'_>, namespace: &str) -> Result<()> {
    let all = pods::prepared(pods::DEVICE_KEYS, namespace, setup.args)?;
    let [lender, wrong, borrower] = &all[..] else {
        bail!("device-keys.yaml has {} pods, and not 3", all.len())
    };
    // One after another, because a link has one receiving secondary at a time.
    setup.cluster.apply(lender).await?;
    setup.wait_for(namespace, "lender", pods::ready).await?;
    setup.cluster.apply(wrong).await?;
    // The pod fails if it can import the key.
    setup.wait_for(namespace, "wrong", pods::succeeded).await?;
    setup.said(namespace, "wrong", "wrong", "refused: the key is for process 1").await?;
    setup.said(namespace, "lender", "shmesh", "not_admitted").await?;
    setup.cluster.apply(borrower).await?;
    setup.wait_for(namespace, "borrower", pods::ready).await?;
    setup
        .said(namespace, "borrower", "borrower", "bytes of the other side's region; all are as written")
        .await?;
    for_service_accounts(setup, namespace).await
}

/// The node's identity service knows the service accounts of pods, so a key can admit one, and no other.
async fn for_service_accounts(setup: &Setup<'_>, namespace: &str) -> Result<()> {
    for account in pods::objects(pods::SERVICE_ACCOUNTS, "ServiceAccount", namespace)? {
        setup.cluster.apply_service_account(&account).await?;
    }
    let all = pods::prepared(pods::SERVICE_ACCOUNTS, namespace, setup.args)?;
    let [owner, stranger, reader] = &all[..] else {
        bail!("service-accounts.yaml has {} pods, and not 3", all.len())
    };
    setup.cluster.apply(owner).await?;
    setup.wait_for(namespace, "owner", pods::ready).await?;
    setup.cluster.apply(stranger).await?;
    // The pod fails if it can import the key.
    setup.wait_for(namespace, "stranger", pods::succeeded).await?;
    setup.said(namespace, "stranger", "stranger", "refused: the key is not for this process").await?;
    setup.said(namespace, "owner", "shmesh", "not_admitted").await?;
    setup.cluster.apply(reader).await?;
    setup.wait_for(namespace, "reader", pods::ready).await?;
    setup.said(namespace, "reader", "reader", "bytes of the other side's region; all are as written").await
}
