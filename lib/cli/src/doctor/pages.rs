//! Huge pages: the effect of `huge_pages: hugetlb` and `huge_pages: transparent` here.

use serde_json::json;

use super::source::Source;
use super::{Finding, FindingStatus, cgroup};
use crate::human;
use shmesh_sys::mountinfo::Mount;

/// The directory of the kernel's huge page pools.
const POOLS: &str = "/sys/kernel/mm/hugepages";
/// The directory of the kernel's settings for transparent huge pages.
const TRANSPARENT: &str = "/sys/kernel/mm/transparent_hugepage";

/// One size of hugetlb pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct HugePagePool {
    /// Size of a page in bytes.
    page: u64,
    /// Number of reserved pages.
    total: u64,
    /// Number of pages that are neither used nor reserved.
    free: u64,
    /// Bytes that the cgroup allows; `None` if unlimited or unknown.
    allowed: Option<u64>,
}

impl HugePagePool {
    /// Bytes that a link can use.
    fn usable(&self) -> u64 {
        let bytes = self.free.saturating_mul(self.page);
        self.allowed.map_or(bytes, |allowed| allowed.min(bytes))
    }
}

/// Page size in bytes of a directory such as `hugepages-2048kB`.
fn page_bytes(name: &str) -> Option<u64> {
    name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

/// The size as the hugetlb cgroup's files name it: `2MB`, `1GB`, `64KB`.
fn cgroup_name(page: u64) -> String {
    match page {
        page if page >= 1 << 30 => format!("{}GB", page >> 30),
        page if page >= 1 << 20 => format!("{}MB", page >> 20),
        page => format!("{}KB", page >> 10),
    }
}

/// The smallest limit of the hugetlb cgroup for one page size among the levels that are visible.
fn allowed(source: &Source, page: u64) -> Option<u64> {
    let place = cgroup::locate(source, "hugetlb").ok()?;
    let kind = if place.version == 1 { "limit_in_bytes" } else { "max" };
    let file = format!("hugetlb.{}.{kind}", cgroup_name(page));
    place
        .dirs
        .iter()
        .filter_map(|dir| source.number(dir.join(&file)).ok())
        .filter(|limit| *limit < 1 << 60)
        .min()
}

/// Reads one pool of huge pages.
fn pool(source: &Source, name: &str) -> Option<HugePagePool> {
    let page = page_bytes(name)?;
    let number = |file: &str| source.number(format!("{POOLS}/{name}/{file}")).ok();
    let free = number("free_hugepages")?.saturating_sub(number("resv_hugepages").unwrap_or_default());
    Some(HugePagePool { page, total: number("nr_hugepages")?, free, allowed: allowed(source, page) })
}

/// The findings about both kinds of huge pages. `mount` is the mount of the IPC directory.
pub(super) fn findings(source: &Source, mount: Option<&Mount>) -> Vec<Finding> {
    vec![hugetlb(source), transparent(source, mount)]
}

/// The finding about huge pages reserved by the administrator.
fn hugetlb(source: &Source) -> Finding {
    const ID: &str = "pages.hugetlb";
    let names = match source.names(POOLS) {
        Ok(names) => names,
        Err(why) => return Finding::unknown(ID, &why, "Do not count on `huge_pages: hugetlb`."),
    };
    let pools: Vec<HugePagePool> = names.iter().filter_map(|name| pool(source, name)).collect();
    let value = json!({ "sizes": pools.iter().map(|pool| json!({
        "page_bytes": pool.page, "total_pages": pool.total, "free_pages": pool.free,
        "cgroup_limit_bytes": pool.allowed,
    })).collect::<Vec<_>>() });
    let list: Vec<String> = pools
        .iter()
        .map(|pool| format!("{}: {} of {} free", human::bytes(pool.page), pool.free, pool.total))
        .collect();
    let shown = if list.is_empty() { "none".to_owned() } else { list.join(", ") };
    if let Some(best) = pools.iter().filter(|pool| pool.usable() > 0).min_by_key(|pool| pool.page) {
        let means = format!(
            "`huge_pages: hugetlb` works for links up to {} (pages of {}): faster to attach; the pod must \
             request hugepages-{}i.",
            human::bytes(best.usable()),
            human::bytes(best.page),
            cgroup_name(best.page).trim_end_matches('B'),
        );
        return Finding::new(ID, FindingStatus::Ok, value, shown, means);
    }
    let means = if pools.iter().any(|pool| pool.free > 0) {
        "The node has free huge pages but this container's cgroup allows none: request hugepages-2Mi in the \
         pod for `huge_pages: hugetlb`; without it leave huge_pages off."
    } else {
        "`huge_pages: hugetlb` is refused at start: the node sets none aside (vm.nr_hugepages, then \
         hugepages-2Mi in the pod); ordinary pages work."
    };
    Finding::new(ID, FindingStatus::Note, value, shown, means)
}

/// The selected word in brackets: `always within_size advise [never] deny force`.
fn chosen(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once('[')?;
    rest.split_once(']').map(|(word, _)| word)
}

/// The finding about transparent huge pages.
fn transparent(source: &Source, mount: Option<&Mount>) -> Finding {
    const ID: &str = "pages.transparent";
    let text = match source.text(format!("{TRANSPARENT}/shmem_enabled")) {
        Ok(text) => text,
        Err(why) => return Finding::unknown(ID, &why, "Do not count on `huge_pages: transparent`."),
    };
    let general = chosen(&text).unwrap_or("unknown");
    // Since 6.11 each size has its own switch, which is "inherit" by default.
    let own = source.text(format!("{TRANSPARENT}/hugepages-2048kB/shmem_enabled")).unwrap_or_default();
    let memfd = match chosen(&own) {
        Some(own) if own != "inherit" && general != "deny" && general != "force" => own,
        _ => general,
    };
    let dir = match general {
        "deny" | "force" => general,
        _ => mount.and_then(|mount| mount.value("huge")).unwrap_or("never"),
    };
    let value = json!({ "shmem_enabled": general, "memfd": memfd, "dir": dir });
    let shown = format!("memfd {memfd}, directory {dir}");
    let (status, means) = match (effect(memfd), effect(dir)) {
        (PageEffect::None, PageEffect::None) if general != "deny" && can_collapse(source) => (
            FindingStatus::Ok,
            "`huge_pages: transparent` works: the creator of a link collapses its pages into huge ones (Linux \
             6.1 or later), whatever shmem_enabled says. Other links stay on small pages."
                .to_owned(),
        ),
        (PageEffect::None, PageEffect::None) => (
            FindingStatus::Note,
            format!(
                "`huge_pages: transparent` changes nothing here: segments stay on small pages, so prefault \
                 them (a peer's first touch of 148 MiB is 38 ms instead of 1 ms); remedy: write `advise` to \
                 {TRANSPARENT}/shmem_enabled on the node."
            ),
        ),
        (PageEffect::None, _) => (
            FindingStatus::Ok,
            "`huge_pages: transparent` works for named segments in the directory, not for memfd segments."
                .to_owned(),
        ),
        (memfd, PageEffect::None) => (
            FindingStatus::Ok,
            format!(
                "{} Named segments in the directory stay on small pages (mount option huge=).",
                memfd.sentence()
            ),
        ),
        (memfd, _) => (FindingStatus::Ok, format!("{} The same holds for the directory.", memfd.sentence())),
    };
    Finding::new(ID, status, value, shown, means)
}

/// Whether the kernel has `MADV_COLLAPSE` for memory in files: Linux 6.1.
fn can_collapse(source: &Source) -> bool {
    let release = source.text("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split(['.', '-']).map_while(|number| number.trim().parse::<u32>().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (6, 1)
}

/// The effect of a setting on a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PageEffect {
    /// No huge pages, even on request.
    None,
    /// Huge pages on request.
    Asked,
    /// Huge pages without a request.
    Always,
}

impl PageEffect {
    /// The sentence for memfd segments.
    fn sentence(self) -> &'static str {
        match self {
            Self::None => "Memfd segments stay on small pages.",
            Self::Asked => "`huge_pages: transparent` works for memfd segments.",
            Self::Always => "Memfd segments get huge pages even without `huge_pages: transparent`.",
        }
    }
}

/// The effect of a setting of `shmem_enabled`.
fn effect(setting: &str) -> PageEffect {
    match setting {
        "advise" => PageEffect::Asked,
        "always" | "within_size" | "force" => PageEffect::Always,
        _ => PageEffect::None,
    }
}

#[cfg(test)]
#[path = "pages_tests.rs"]
mod tests;
