//! Rules of the plan, and an oracle: applying a plan leaves nothing to do.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{Device, DeviceTaint, ResourceSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{OwnerReference, Time};
use k8s_openapi::jiff::Timestamp;
use proptest::prelude::*;

use super::plan::{Adoption, Adoptions, PoolIdentity, SliceWrites, Slices, canonical_devices, plan};

fn identity() -> PoolIdentity {
    let owner = OwnerReference {
        api_version: "v1".into(),
        kind: "Node".into(),
        name: "n1".into(),
        uid: "u1".into(),
        controller: Some(true),
        block_owner_deletion: None,
    };
    PoolIdentity { driver: "gpu.example.com".into(), node: "n1".into(), owner }
}

fn devices(count: usize) -> Vec<Device> {
    (0..count).map(|index| Device { name: format!("d{index}"), ..Device::default() }).collect()
}

fn taint() -> DeviceTaint {
    DeviceTaint { effect: "NoSchedule".into(), key: "drain".into(), time_added: None, value: None }
}

/// The slices of the API server after the writes.
fn applied(mut slices: Slices, plan: &SliceWrites) -> Slices {
    for slice in &plan.delete {
        slices.remove(slice.metadata.name.as_ref().expect("it has a name"));
    }
    for slice in &plan.apply {
        slices.insert(slice.metadata.name.clone().expect("it has a name"), slice.clone());
    }
    slices
}

fn fresh(devices: &[Device], existing: &Slices) -> SliceWrites {
    plan(&identity(), devices, existing, &Adoptions::new(), 0)
}

fn generations(slices: &Slices) -> Vec<i64> {
    slices.values().map(|slice| slice.spec.pool.generation).collect()
}

#[test]
fn node_without_devices_has_an_empty_slice() {
    let slices = applied(Slices::new(), &fresh(&[], &Slices::new()));
    let (name, slice) = slices.first_key_value().expect("there is one");
    assert!(name.starts_with("00000-gpu.example.com-n1-"), "{name}");
    assert_eq!((slice.spec.pool.generation, slice.spec.pool.resource_slice_count), (1, 1));
    assert_eq!(slice.spec.node_name.as_deref(), Some("n1"));
    assert_eq!(slice.metadata.owner_references.as_ref().expect("one")[0].uid, "u1");
}

#[test]
fn devices_are_split_at_the_limits_of_the_api() {
    let lengths = |devices: &[Device]| {
        let slices = applied(Slices::new(), &fresh(devices, &Slices::new()));
        slices.values().map(|slice| slice.spec.devices.as_ref().map_or(0, Vec::len)).collect::<Vec<_>>()
    };
    assert_eq!(lengths(&devices(128)), [128]);
    assert_eq!(lengths(&devices(129)), [128, 1]);
    assert_eq!(lengths(&devices(300)), [128, 128, 44]);
    let mut tainted = devices(129);
    tainted[3].taints = Some(vec![taint()]);
    assert_eq!(lengths(&tainted), [64, 64, 1]);
}

#[test]
fn one_change_keeps_the_generation_and_two_do_not() {
    let mut wanted = devices(300);
    let first = applied(Slices::new(), &fresh(&wanted, &Slices::new()));
    assert_eq!(generations(&first), [1, 1, 1]);
    assert!(fresh(&wanted, &first).is_empty());
    wanted[200].allow_multiple_allocations = Some(true);
    let one = fresh(&wanted, &first);
    assert_eq!(one.apply.len(), 1);
    let second = applied(first, &one);
    assert_eq!(generations(&second), [1, 1, 1]);
    wanted[0].allow_multiple_allocations = Some(true);
    wanted[299].allow_multiple_allocations = Some(true);
    let third = applied(second.clone(), &fresh(&wanted, &second));
    assert_eq!(generations(&third), [2, 2, 2]);
    // A slice less: the count of the others changes.
    let fewer = fresh(&wanted[..256], &third);
    assert_eq!((fewer.delete.len(), fewer.apply.len()), (1, 2));
    let fourth = applied(third, &fewer);
    assert_eq!(generations(&fourth), [3, 3]);
    assert!(fourth.values().all(|slice| slice.spec.pool.resource_slice_count == 2));
}

#[test]
fn slice_that_was_deleted_comes_back_with_the_next_generation() {
    let wanted = devices(200);
    let mut slices = applied(Slices::new(), &fresh(&wanted, &Slices::new()));
    slices.pop_first();
    let repair = fresh(&wanted, &slices);
    // What exists is changed before the new one is made.
    let names: Vec<_> =
        repair.apply.iter().map(|slice| &slice.metadata.name.as_ref().expect("a name")[..5]).collect();
    assert_eq!(names, ["00001", "00000"]);
    assert_eq!(generations(&applied(slices, &repair)), [2, 2]);
    // Also after a wipe, if the generation is known.
    let all = plan(&identity(), &wanted, &Slices::new(), &Adoptions::new(), 7);
    assert_eq!(generations(&applied(Slices::new(), &all)), [8, 8]);
}

#[test]
fn slices_of_other_names_and_pools_are_deleted() {
    let mut slices = applied(Slices::new(), &fresh(&devices(1), &Slices::new()));
    let mut other: ResourceSlice = slices.values().next().expect("one").clone();
    other.spec.pool.name = "old".into();
    other.spec.pool.generation = 99;
    slices.insert("random-x7k2p".into(), other);
    let cleanup = fresh(&devices(1), &slices);
    assert_eq!((cleanup.delete.len(), cleanup.apply.len()), (1, 0));
}

#[test]
fn new_node_of_the_same_name_becomes_the_owner() {
    let slices = applied(Slices::new(), &fresh(&devices(1), &Slices::new()));
    let mut identity = identity();
    identity.owner.uid = "u2".into();
    let change = plan(&identity, &devices(1), &slices, &Adoptions::new(), 0);
    assert_eq!(change.apply[0].metadata.owner_references.as_ref().expect("one")[0].uid, "u2");
}

#[test]
fn time_of_a_taint_stays() {
    let mut wanted = devices(2);
    wanted[1].taints = Some(vec![taint()]);
    let mut slices = applied(Slices::new(), &fresh(&wanted, &Slices::new()));
    let time = Some(Time(Timestamp::UNIX_EPOCH));
    for device in slices.values_mut().flat_map(|slice| slice.spec.devices.iter_mut().flatten()) {
        device.taints.iter_mut().flatten().for_each(|taint| taint.time_added = time.clone());
    }
    assert!(fresh(&wanted, &slices).is_empty());
    wanted[0].taints = Some(vec![taint()]);
    let change = fresh(&wanted, &slices);
    let devices = change.apply[0].spec.devices.as_ref().expect("devices");
    let time_of = |device: &Device| device.taints.as_ref().expect("taints")[0].time_added.clone();
    assert_eq!((time_of(&devices[0]), time_of(&devices[1])), (None, time));
}

#[test]
fn fields_dropped_by_api_server_are_not_written_again() {
    let mut wanted = devices(1);
    wanted[0].allow_multiple_allocations = Some(true);
    let mut slices = applied(Slices::new(), &fresh(&wanted, &Slices::new()));
    let intended = canonical_devices(slices.values().next().expect("one"));
    let (name, slice) = slices.iter_mut().next().expect("one");
    slice.spec.devices.as_mut().expect("devices")[0].allow_multiple_allocations = None;
    let adoption = Adoption { wanted: intended, stored: canonical_devices(slice) };
    let adoptions = BTreeMap::from([(name.clone(), adoption)]);
    assert!(!fresh(&wanted, &slices).is_empty());
    assert!(plan(&identity(), &wanted, &slices, &adoptions, 0).is_empty());
    wanted[0].name = "other".into();
    assert!(!plan(&identity(), &wanted, &slices, &adoptions, 0).is_empty());
}

#[test]
fn names_of_slices_are_short_enough_and_distinct() {
    let with = |driver: &str, node: &str| {
        let identity = PoolIdentity { driver: driver.into(), node: node.into(), ..identity() };
        plan(&identity, &[], &Slices::new(), &Adoptions::new(), 0).apply[0]
            .metadata
            .name
            .clone()
            .expect("a name")
    };
    assert_ne!(with("a-b", "c"), with("a", "b-c"));
    let long = with(&"d".repeat(63), &format!("{}.n", "n".repeat(251)));
    assert_eq!(long.len(), 253);
    assert_ne!(long, with(&"d".repeat(63), &format!("{}.m", "n".repeat(251))));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Whatever was there, one plan makes it right: each device once, one generation, the right count.
    #[test]
    fn one_plan_is_enough(
        before in 0_usize..300,
        after in 0_usize..300,
        edits in prop::collection::vec((0_usize..3, 0_u8..5), 0..4),
    ) {
        let mut slices = applied(Slices::new(), &fresh(&devices(before), &Slices::new()));
        for (index, edit) in edits {
            let Some(name) = slices.keys().nth(index).cloned() else { continue };
            let slice = slices.get_mut(&name).expect("it is there");
            match edit {
                0 => drop(slices.remove(&name)),
                1 => slice.spec.pool.generation += 40,
                2 => slice.spec.devices = None,
                3 => slice.metadata.owner_references = None,
                _ => slice.spec.pool.resource_slice_count = 9,
            }
        }
        let highest = generations(&slices).into_iter().max().unwrap_or(0);
        let wanted = devices(after);
        let result = applied(slices.clone(), &fresh(&wanted, &slices));
        prop_assert!(fresh(&wanted, &result).is_empty());
        let published: Vec<Device> = result.values().flat_map(|slice| slice.spec.devices.clone().unwrap_or_default()).collect();
        prop_assert_eq!(published, wanted);
        let count = i64::try_from(result.len()).expect("few");
        let first = result.values().next().expect("at least one").spec.pool.generation;
        prop_assert!(first >= highest);
        prop_assert!(result.values().all(|slice| slice.spec.pool.generation == first && slice.spec.pool.resource_slice_count == count));
    }
}
