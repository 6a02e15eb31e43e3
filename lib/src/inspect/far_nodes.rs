//! The file of a bridge about a link and a far node, for its next process and for `shmesh ls`.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use shmesh_sys::time;

use super::segments::MAX_ENTRIES;
use crate::config::LinkName;

/// The start of the names of these files, in the IPC directory.
pub(super) const PREFIX: &str = ".shmesh-bridge-";

/// The first word of a file: its format.
pub const FAR_NODE_MAGIC: u64 = u64::from_le_bytes(*b"SHMBRDG4");
/// Words of 8 bytes in a file.
pub const FAR_NODE_WORDS: usize = 19;

/// The words of a file, by their place.
///
/// Releases next to each other share these files: words are only added at the end, and a file with fewer has zeros there. The first half is for the bridge's next process, the second for those that look. A bridge writes each word as one.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
#[repr(usize)]
pub enum FarNodeWord {
    /// [`FAR_NODE_MAGIC`].
    Magic,
    /// The stream that it sends.
    SentStream,
    /// The number of the last message that it took from the link.
    Taken,
    /// The stream that it receives.
    ReceivedStream,
    /// The number of the last message that it began to pass to the link.
    Begun,
    /// The number of the last message that it passed to the link.
    Done,
    /// The epoch of the link with a broadcast ring for which `Base` holds.
    Epoch,
    /// The position in the broadcast ring less the number in the stream.
    Base,
    /// Lost messages of the other side that were not reported to the link's receivers yet.
    Unreported,
    /// When the bridge wrote last, in milliseconds since boot.
    WrittenMs,
    /// For how long the other side may be silent, in milliseconds.
    PeerTimeoutMs,
    /// 1 if the other side answers.
    IsConnected,
    /// The round trip between the bridges in microseconds; 0: not measured yet.
    RoundTripUs,
    /// Messages taken from the link and sent.
    Sent,
    /// Messages received and passed to the link.
    Received,
    /// Messages of the other side that can no longer come.
    Lost,
    /// Bytes of the messages sent.
    SentBytes,
    /// Bytes of the messages received.
    ReceivedBytes,
    /// Bytes per second, of both directions together, over the last second or longer.
    BytesPerSecond,
}

/// A far node of a link, as its bridge sees it. The counts are those since the file exists, over all processes of the bridge.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct FarNode {
    /// The name of the far node; at the far end, of this node.
    pub node: String,
    /// Whether the bridge runs: it has written lately.
    pub is_running: bool,
    /// Whether the other side's bridge answers.
    pub is_connected: bool,
    /// The round trip between the bridges, without the links.
    pub round_trip: Option<Duration>,
    /// Messages sent to the other side.
    pub sent: u64,
    /// Messages received from the other side.
    pub received: u64,
    /// Messages of the other side that can no longer come.
    pub lost: u64,
    /// Bytes of the messages sent.
    pub sent_bytes: u64,
    /// Bytes of the messages received.
    pub received_bytes: u64,
    /// Bytes per second, of both directions together.
    pub bytes_per_second: u64,
}

/// The file of a link and a far node.
#[must_use]
pub fn far_node_file(dir: &Path, link: &LinkName, node: &str) -> PathBuf {
    dir.join(format!("{PREFIX}{link}@{node}"))
}

/// The far nodes of a link, sorted by name: those whose bridges this user may read, whether they run or not.
///
/// # Errors
/// The directory cannot be read.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
/// use shmesh::inspect::far_nodes;
/// assert!(far_nodes(dir.path(), &"fronthaul".parse()?)?.is_empty(), "no bridge carries it");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn far_nodes(dir: &Path, link: &LinkName) -> io::Result<Vec<FarNode>> {
    let prefix = format!("{PREFIX}{link}@");
    let mut nodes = Vec::new();
    for entry in std::fs::read_dir(dir)?.take(MAX_ENTRIES) {
        let Ok(name) = entry?.file_name().into_string() else { continue };
        let Some(node) = name.strip_prefix(&prefix) else { continue };
        // Of another user, or removed in the meantime, or of another format.
        nodes.extend(std::fs::read(dir.join(&name)).ok().and_then(|bytes| read(node, &bytes)));
    }
    nodes.sort_by(|a: &FarNode, b| a.node.cmp(&b.node));
    Ok(nodes)
}

fn read(node: &str, bytes: &[u8]) -> Option<FarNode> {
    let (words, rest) = bytes.as_chunks::<8>();
    let word = |word: FarNodeWord| words.get(word as usize).map_or(0, |bytes| u64::from_ne_bytes(*bytes));
    if !rest.is_empty() || word(FarNodeWord::Magic) != FAR_NODE_MAGIC {
        return None;
    }
    let age_ms = (time::monotonic_nanos() / 1_000_000).saturating_sub(word(FarNodeWord::WrittenMs));
    // It writes five times as often.
    let is_running = age_ms <= word(FarNodeWord::PeerTimeoutMs);
    Some(FarNode {
        node: node.to_owned(),
        is_running,
        is_connected: is_running && word(FarNodeWord::IsConnected) == 1,
        round_trip: Some(word(FarNodeWord::RoundTripUs)).filter(|us| *us > 0).map(Duration::from_micros),
        sent: word(FarNodeWord::Sent),
        received: word(FarNodeWord::Received),
        lost: word(FarNodeWord::Lost),
        sent_bytes: word(FarNodeWord::SentBytes),
        received_bytes: word(FarNodeWord::ReceivedBytes),
        bytes_per_second: word(FarNodeWord::BytesPerSecond),
    })
}

#[cfg(all(test, not(any(loom, miri))))]
mod tests {
    use super::*;

    #[test]
    fn files_of_other_links_and_formats_are_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let link: LinkName = "a".parse().unwrap();
        let mut words = [0_u64; FAR_NODE_WORDS];
        words[0] = FAR_NODE_MAGIC;
        words[FarNodeWord::WrittenMs as usize] = time::monotonic_nanos() / 1_000_000;
        words[FarNodeWord::PeerTimeoutMs as usize] = 60_000;
        words[FarNodeWord::IsConnected as usize] = 1;
        words[FarNodeWord::Lost as usize] = 7;
        let write = |link: &str, node: &str, words: &[u64]| {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
            std::fs::write(far_node_file(dir.path(), &link.parse().unwrap(), node), bytes).unwrap();
        };
        write("a", "running", &words);
        write("ab", "running", &words);
        write("a", "damaged", &words[1..]);
        write("a", "shorter", &words[..FAR_NODE_WORDS - 1]);
        words[FarNodeWord::PeerTimeoutMs as usize] = 0;
        words[FarNodeWord::WrittenMs as usize] = 1;
        write("a", "ended", &words);
        words[0] += 1;
        write("a", "newer", &words);
        let nodes = far_nodes(dir.path(), &link).unwrap();
        let seen: Vec<_> = nodes.iter().map(|node| (&node.node[..], node.is_running, node.lost)).collect();
        assert_eq!(seen, [("ended", false, 7), ("running", true, 7), ("shorter", true, 7)]);
        assert_eq!((nodes[0].is_connected, nodes[1].is_connected), (false, true));
    }
}
