//! The part of a configuration that a cluster shows, for programs that are not on the node.

use serde_json::{Map, Value};

use super::{Config, ConfigLimits, FrontEnd, source};

/// The page size that is assumed; a node with larger pages checks its configuration itself.
const PAGE_BYTES: u64 = 4096;

/// The part of a valid configuration that is visible in the cluster.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ConfigSummary {
    /// Domain of the resources, which is also the name of the DRA driver.
    pub domain: String,
    /// Whether the DRA driver serves the kubelet, and not the device plugin.
    pub is_dra: bool,
    /// Whether devices are given to containers by CDI.
    pub has_cdi: bool,
    /// Names of the resources that every node advertises in mode `devicePlugin`, without the domain.
    pub resources: Vec<String>,
    /// Name and group of each pool.
    pub pools: Vec<(String, u32)>,
}

impl ConfigSummary {
    /// Reads the text of a configuration file as the plugin does on a node with `memory` bytes, without looking at the node's paths.
    ///
    /// # Errors
    /// All problems of the configuration, each with its path and the remedy.
    pub fn read(text: &str, memory: u64) -> Result<Self, String> {
        let document = match source::parsed("plugin.yaml", text)? {
            Value::Null => Value::Object(Map::new()),
            document => document,
        };
        let limits = ConfigLimits { page: PAGE_BYTES, memory, numa: Vec::new(), has_paths: false };
        let config =
            Config::checked(document, Vec::new(), &limits).map_err(|problems| problems.to_string())?;
        let pools: Vec<_> = config.pools.iter().map(|pool| (pool.name.clone(), pool.gid())).collect();
        let has_shm = config.shm.budget.of(memory) > 0;
        let own = [("shm", has_shm), ("agent", config.identity.attachments > 0)];
        let own = own.into_iter().filter(|(_, is_there)| *is_there).map(|(name, _)| name.to_owned());
        let resources = own.chain(pools.iter().map(|(name, _)| name.clone())).collect();
        let (is_dra, has_cdi) = (config.mode == FrontEnd::Dra, config.cdi.enabled);
        Ok(Self { domain: config.domain, is_dra, has_cdi, resources, pools })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_has_what_nodes_advertise() {
        let text = "shm: {budget: 0}\npools: [{name: fronthaul, gid: 60001}]\nfakeInventory: /nowhere\nhostRoot: /host\n";
        let summary = ConfigSummary::read(text, 1 << 34).unwrap();
        assert_eq!(summary.domain, "shmesh.io");
        assert_eq!(summary.resources, ["agent", "fronthaul"]);
        assert_eq!((summary.pools, summary.is_dra), (vec![("fronthaul".to_owned(), 60_001)], false));
        assert!(summary.has_cdi && ConfigSummary::read("mode: dra", 1 << 34).unwrap().is_dra);
        let without = ConfigSummary::read("shm: {budget: 0}\ncdi: {enabled: false}", 1 << 34).unwrap();
        assert!(!without.has_cdi);
        assert_eq!(ConfigSummary::read("", 1 << 34).unwrap().resources, ["shm", "agent"]);
    }

    #[test]
    fn problems_are_those_that_the_plugin_reports() {
        let error = ConfigSummary::read("shm: {unit: 1}\nwrong: 1\n", 1 << 34).unwrap_err();
        assert!(error.contains("shm.unit: ") && error.contains("wrong: "), "{error}");
        assert!(ConfigSummary::read("[", 1 << 34).is_err());
        assert!(ConfigSummary::read("- 1", 1 << 34).is_err());
    }
}
