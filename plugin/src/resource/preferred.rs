//! Chooses which free units to allocate: on one NUMA node, then on one device, then packed.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::Resource;
use super::allocate::{AllocateError, known};

/// Unit indexes by NUMA node and device.
type Groups = BTreeMap<Option<u32>, BTreeMap<usize, Vec<usize>>>;

/// Chooses `size` units of `available`, including all of `must`.
pub(crate) fn choose(
    resource: &Resource,
    available: &[String],
    must: &[String],
    size: i64,
) -> Result<Vec<String>, AllocateError> {
    let free = known(resource, available)?;
    let musts = known(resource, must)?;
    let wrong = || AllocateError::Size {
        resource: resource.name.clone(),
        asked: size,
        must: must.len(),
        available: available.len(),
    };
    let mut is_free = vec![false; resource.units.len()];
    free.iter().for_each(|&at| is_free[at] = true);
    let wanted = usize::try_from(size).map_err(|_| wrong())?;
    let all_free = musts.iter().all(|&at| is_free[at]);
    if wanted == 0 || wanted > free.len() || musts.len() > wanted || !all_free {
        return Err(wrong());
    }
    musts.iter().for_each(|&at| is_free[at] = false);
    let mut chosen = musts;
    take(resource, &is_free, &mut chosen, wanted);
    Ok(chosen.into_iter().map(|at| resource.units[at].id.clone()).collect())
}

fn take(resource: &Resource, is_free: &[bool], chosen: &mut Vec<usize>, wanted: usize) {
    let mut groups = Groups::new();
    for (at, unit) in resource.units.iter().enumerate().filter(|&(at, _)| is_free[at]) {
        groups.entry(unit.numa).or_default().entry(unit.device).or_default().push(at);
    }
    let musts: Vec<_> = chosen.iter().map(|&at| &resource.units[at]).collect();
    let mut nodes: Vec<_> = groups
        .iter()
        .map(|(numa, devices)| {
            let free = devices.values().map(Vec::len).sum();
            (order(musts.iter().any(|unit| unit.numa == *numa), free, wanted - musts.len()), *numa)
        })
        .collect();
    nodes.sort_unstable();
    let near: Vec<_> = musts.iter().map(|unit| unit.device).collect();
    for (_, numa) in nodes {
        let devices = &groups[&numa];
        let missing = wanted - chosen.len();
        let mut devices: Vec<_> = devices
            .iter()
            .map(|(device, units)| (order(near.contains(device), units.len(), missing), units))
            .collect();
        devices.sort_unstable();
        for (_, units) in devices {
            let missing = wanted - chosen.len();
            chosen.extend(units.iter().take(missing));
        }
    }
}

/// Sort key: groups already in use first; then groups that suffice, the fullest first to keep large groups
/// whole; then groups that do not suffice, the emptiest first to use few of them.
fn order(is_near: bool, free: usize, missing: usize) -> (bool, bool, usize, Reverse<usize>) {
    let is_enough = free >= missing;
    let (fullest, emptiest) = if is_enough { (free, 0) } else { (0, free) };
    (!is_near, !is_enough, fullest, Reverse(emptiest))
}
