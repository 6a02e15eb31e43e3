//! Checks whether a running plugin can take over a changed configuration.
//!
//! The chart restarts the plugin when one of these values changes. `helm/tests/restarts.yaml` lists every key for both.

use anyhow::{Result, ensure};

use super::{Config, Pool};
use crate::resource::allocate::AllocateSettings;

/// Fails if the new configuration differs in a value that only a restart can change.
pub(crate) fn check_reload(before: &Config, after: &Config) -> Result<()> {
    let fixed = |config: &Config| {
        let Config { mode, dra, host_root, kubelet, cdi, identity, .. } = config.clone();
        (mode, dra, host_root, kubelet, cdi, identity, AllocateSettings::of(config))
    };
    ensure!(
        fixed(after) == fixed(before),
        "keeping the previous configuration: domain, mode, dra, hostRoot, kubelet, cdi and identity can only be changed by a restart"
    );
    for pool in &after.pools {
        let given = |pool: &Pool, config: &Config| {
            (pool.directory(config), pool.mount_path.clone(), pool.gid(), pool.user_namespaces)
        };
        let old = before.pools.iter().find(|old| old.name == pool.name);
        // A restarting container combines its old allocation with the current CDI specification.
        ensure!(
            old.is_none_or(|old| given(old, before) == given(pool, after)),
            "keeping the previous configuration: directory, mountPath, gid and userNamespaces of pool {} can only be \
             changed by a restart; or rename the pool",
            pool.name
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde::Deserialize;
    use serde_json::Value;

    use super::*;

    /// The effect of a change of one key.
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Change {
        to: Value,
        does: ChangeEffect,
        #[serde(default)]
        base: BTreeMap<String, Value>,
    }

    #[derive(Deserialize, Debug, PartialEq)]
    #[serde(rename_all = "lowercase")]
    enum ChangeEffect {
        /// The plugin takes it over.
        Reload,
        /// The chart restarts the plugin.
        Restart,
        /// The chart refuses the key.
        Refused,
    }

    /// Sets `pools[].gid` or `shm.unit`.
    fn set(config: &mut Value, key: &str, value: &Value) {
        let target =
            key.replace("[]", ".0").split('.').fold(config, |at, part| match part.parse::<usize>() {
                Ok(index) => &mut at[index],
                Err(_) => &mut at[part],
            });
        *target = value.clone();
    }

    #[test]
    fn every_key_is_reloaded_unless_the_chart_restarts_the_plugin() {
        let text = include_str!("../../../helm/tests/restarts.yaml");
        let changes: BTreeMap<String, Change> = serde_saphyr::from_str(text).unwrap();
        let (mut reloaded, mut restarted) = (0, 0);
        for (key, Change { to, does, base }) in changes {
            let mut before = serde_json::to_value(Config::default()).unwrap();
            before["pools"] = serde_json::json!([{"name": "fronthaul", "gid": 60001}]);
            for (key, value) in &base {
                set(&mut before, key, value);
            }
            let mut after = before.clone();
            set(&mut after, &key, &to);
            let [before, after]: [Config; 2] =
                [before, after].map(|config| serde_json::from_value(config).unwrap());
            assert_ne!(before, after, "{key}: the value is the default");
            let is_reloadable = check_reload(&before, &after).is_ok();
            match does {
                ChangeEffect::Reload => {
                    assert!(is_reloadable, "{key} must restart the plugin, which cannot reload it");
                    reloaded += 1;
                }
                // A mount can be needed for what the plugin itself could reload.
                ChangeEffect::Restart => restarted += 1,
                ChangeEffect::Refused => {}
            }
        }
        assert!(reloaded > 10 && restarted > 10, "{reloaded} {restarted}");
    }
}
