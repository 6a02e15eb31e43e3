//! A device key works only for the admitted process. The wrong pod has the same key, user and pool.

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
        .await
}
