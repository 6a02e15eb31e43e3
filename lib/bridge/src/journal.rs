//! Which messages a bridge has taken and delivered, for the next process of this bridge.
//!
//! A small file in the IPC directory, mapped, so that a number is written without a system call and outlives the process. It does not
//! outlive the machine, and neither do the links. The second half of it is what `shmesh ls` shows.
//!
//! Between two stores a process may be killed. The numbers are written so that a message is then counted as lost, never delivered
//! twice: `taken` before the message is received, `begun` before it is sent, and `done` after.

// UNSAFETY: maps a file, and reads the mapping as atomic words.
#![expect(unsafe_code, reason = "a mapping that outlives the process")]
#![expect(clippy::disallowed_types, reason = "words in a file, which no model can replace")]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use memmap2::MmapMut;
use shmesh::inspect::{FAR_NODE_MAGIC, FAR_NODE_WORDS, FarNodeWord as Word};
use shmesh_sys::time;

const BYTES: u64 = (FAR_NODE_WORDS * 8) as u64;

/// The file of one bridge and one of its peers.
#[derive(Debug)]
pub struct Journal {
    map: MmapMut,
    /// Locked: two bridges with one journal would count with the same numbers.
    _file: File,
}

/// The numbers that the last process of this bridge wrote.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Past {
    /// The stream that it sent; 0: there was none.
    pub sent_stream: u64,
    /// The number of the last message that it took from the link, or was about to take.
    pub taken: u64,
    /// The stream that it received; 0: there was none.
    pub received_stream: u64,
    /// The number of the last message that it passed to the link, or was about to pass.
    pub delivered: u64,
    /// Whether it was killed while it passed the last one: that one may be lost.
    pub is_last_lost: bool,
}

impl Journal {
    /// Opens the file, or makes it, and reads what the last process left.
    ///
    /// # Errors
    /// The file cannot be opened or mapped, or another bridge uses it.
    pub fn open(path: &Path) -> io::Result<(Self, Past)> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o644);
        let in_use = "another bridge of this link and node uses it; stop that one first";
        let file = options.open(path)?;
        file.try_lock().map_err(|_| io::Error::new(io::ErrorKind::WouldBlock, in_use))?;
        // Another bridge may have removed it before it was locked.
        let number = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
        if std::fs::metadata(path).map(number).ok() != Some(number(file.metadata()?)) {
            return Err(io::Error::new(io::ErrorKind::WouldBlock, in_use));
        }
        // Of an earlier release it may be shorter, and of a later one longer: words are only added at its end.
        if file.metadata()?.len() < BYTES {
            file.set_len(BYTES)?;
        }
        // SAFETY: only this user may write the file, and its name is of this bridge alone, which no other process writes or truncates; the
        // words are only accessed as atomics.
        let map = unsafe { MmapMut::map_mut(&file)? };
        let journal = Self { map, _file: file };
        if journal.word(Word::Magic).load(Ordering::Relaxed) != FAR_NODE_MAGIC {
            (0..FAR_NODE_WORDS).for_each(|place| journal.place(place).store(0, Ordering::Relaxed));
            journal.word(Word::Magic).store(FAR_NODE_MAGIC, Ordering::Relaxed);
        }
        let read = |word| journal.word(word).load(Ordering::Relaxed);
        let past = Past {
            sent_stream: read(Word::SentStream),
            taken: read(Word::Taken),
            received_stream: read(Word::ReceivedStream),
            delivered: read(Word::Begun),
            is_last_lost: read(Word::Begun) != read(Word::Done),
        };
        if past.is_last_lost {
            journal.lost(1);
        }
        journal.done(past.delivered);
        Ok((journal, past))
    }

    /// Whether no message was ever sent, received or missed: the next process needs none of the numbers.
    pub fn is_unused(&self) -> bool {
        let words = [Word::Taken, Word::Epoch, Word::Sent, Word::Received, Word::Lost];
        words.into_iter().all(|word| self.word(word).load(Ordering::Relaxed) == 0)
    }

    fn word(&self, word: Word) -> &AtomicU64 {
        self.place(word as usize)
    }

    fn place(&self, place: usize) -> &AtomicU64 {
        let start = self.map.as_ptr().cast::<AtomicU64>();
        assert!(place < FAR_NODE_WORDS);
        // SAFETY: the mapping has that many words and starts at a page; it lives as long as `self`.
        unsafe { &*start.add(place) }
    }

    /// The position in a broadcast ring less the number in the stream, if it was written for the link of this epoch.
    pub fn base(&self, epoch: u64) -> Option<u64> {
        (self.word(Word::Epoch).load(Ordering::Acquire) == epoch)
            .then(|| self.word(Word::Base).load(Ordering::Acquire))
    }

    /// Sets the [`base`](Self::base) for the link of this epoch.
    pub fn set_base(&self, epoch: u64, base: u64) {
        self.word(Word::Epoch).store(0, Ordering::Release);
        self.word(Word::Base).store(base, Ordering::Release);
        self.word(Word::Epoch).store(epoch, Ordering::Release);
    }

    /// A new stream is sent. Its first number will be 1.
    pub fn begin_sent_stream(&self, stream: u64) {
        self.word(Word::Taken).store(0, Ordering::Release);
        self.word(Word::SentStream).store(stream, Ordering::Release);
    }

    /// The message of this number is about to be received from the link.
    pub fn taking(&self, number: u64) {
        self.word(Word::Taken).store(number, Ordering::Release);
    }

    /// A stream is received whose last delivered number is this.
    pub fn begin_received_stream(&self, stream: u64, delivered: u64) {
        // Without a stream the numbers mean nothing.
        self.word(Word::ReceivedStream).store(0, Ordering::Release);
        self.passed(delivered);
        self.word(Word::ReceivedStream).store(stream, Ordering::Release);
    }

    /// The message of this number is about to be sent on the link.
    pub fn delivering(&self, number: u64) {
        self.word(Word::Begun).store(number, Ordering::Release);
    }

    /// The message of this number was sent on the link, or is given up.
    pub fn done(&self, number: u64) {
        self.word(Word::Done).store(number, Ordering::Release);
    }

    /// Whether the message of this number was sent on the link, or is given up.
    pub fn is_done(&self, number: u64) -> bool {
        self.word(Word::Done).load(Ordering::Relaxed) == number
    }

    /// The numbers up to this one are done with: nothing is to be sent for the last one, or it is lost.
    pub fn passed(&self, number: u64) {
        self.delivering(number);
        self.done(number);
    }

    /// The other side was sent to, or is about to: what people are shown of it.
    pub fn tell(&self, is_connected: bool, peer_timeout: Duration, round_trip: Option<Duration>) {
        let number = |time: Duration, unit: u128| u64::try_from(time.as_nanos() / unit).unwrap_or(u64::MAX);
        let round_trip = round_trip.map_or(0, |trip| number(trip, 1_000).max(1));
        self.word(Word::PeerTimeoutMs).store(number(peer_timeout, 1_000_000), Ordering::Relaxed);
        self.word(Word::IsConnected).store(u64::from(is_connected), Ordering::Relaxed);
        self.word(Word::RoundTripUs).store(round_trip, Ordering::Relaxed);
        self.word(Word::WrittenMs).store(time::monotonic_nanos() / 1_000_000, Ordering::Relaxed);
    }

    /// A message of this many bytes was sent.
    pub fn sent(&self, bytes: u64) {
        self.add(Word::Sent, 1);
        self.add(Word::SentBytes, bytes);
    }

    /// A message of this many bytes was passed to the link.
    pub fn received(&self, bytes: u64) {
        self.add(Word::Received, 1);
        self.add(Word::ReceivedBytes, bytes);
    }

    /// Messages of the other side can no longer come. They are to be reported to the receivers of the link.
    pub fn lost(&self, messages: u64) {
        self.add(Word::Lost, messages);
        self.add(Word::Unreported, messages);
    }

    /// Lost messages that were not reported to the receivers of the link yet.
    pub fn unreported(&self) -> u64 {
        self.word(Word::Unreported).load(Ordering::Relaxed)
    }

    /// All that is lost was reported to the receivers. A kill before this has it reported once more, which is better than never.
    pub fn reported(&self) {
        self.word(Word::Unreported).store(0, Ordering::Release);
    }

    /// Bytes that have crossed so far, in both directions.
    pub fn bytes(&self) -> u64 {
        let read = |word| self.word(word).load(Ordering::Relaxed);
        read(Word::SentBytes).wrapping_add(read(Word::ReceivedBytes))
    }

    /// Sets the rate that people are shown.
    pub fn set_rate(&self, bytes_per_second: u64) {
        self.word(Word::BytesPerSecond).store(bytes_per_second, Ordering::Relaxed);
    }

    /// No other process writes the counts, so an addition need not be atomic.
    fn add(&self, word: Word, more: u64) {
        let word = self.word(word);
        word.store(word.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
    }

    /// The last message was not sent after all.
    pub fn not_delivered(&self, number: u64) {
        self.word(Word::Begun).store(number - 1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_process_reads_what_the_last_one_wrote() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let (journal, past) = Journal::open(&path).unwrap();
        assert_eq!(past, Past::default());
        journal.begin_sent_stream(7);
        journal.taking(3);
        journal.begin_received_stream(8, 10);
        journal.delivering(11);
        journal.set_base(5, 40);
        assert_eq!(Journal::open(&path).unwrap_err().kind(), io::ErrorKind::WouldBlock, "it is in use");
        drop(journal);
        let (journal, killed_between) = Journal::open(&path).unwrap();
        assert_eq!((journal.base(5), journal.base(6)), (Some(40), None));
        drop(journal);
        let expected =
            Past { sent_stream: 7, taken: 3, received_stream: 8, delivered: 11, is_last_lost: true };
        assert_eq!(killed_between, expected);
        let (journal, past) = Journal::open(&path).unwrap();
        assert_eq!(past, Past { is_last_lost: false, ..expected }, "counted once");
        assert_eq!(journal.unreported(), 1, "until it is reported");
        journal.reported();
        journal.delivering(12);
        journal.not_delivered(12);
        drop(journal);
        assert_eq!(Journal::open(&path).unwrap().1.delivered, 11);
    }

    #[test]
    fn journal_is_used_as_soon_as_there_is_something_to_count() {
        let uses: [fn(&Journal); 5] = [
            |journal| journal.taking(1),
            |journal| journal.set_base(5, 40),
            |journal| journal.sent(8),
            |journal| journal.received(8),
            |journal| journal.lost(1),
        ];
        for use_it in uses {
            let dir = tempfile::tempdir().unwrap();
            let (journal, _) = Journal::open(&dir.path().join("journal")).unwrap();
            journal.begin_sent_stream(7);
            journal.begin_received_stream(8, 10);
            assert!(journal.is_unused());
            use_it(&journal);
            assert!(!journal.is_unused());
        }
    }

    #[test]
    fn file_of_a_release_with_fewer_or_more_words_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let (journal, _) = Journal::open(&path).unwrap();
        journal.begin_sent_stream(7);
        journal.taking(3);
        journal.sent(5);
        journal.set_rate(1);
        drop(journal);
        for bytes in [BYTES - 8, BYTES + 64] {
            OpenOptions::new().write(true).open(&path).unwrap().set_len(bytes).unwrap();
            let (journal, past) = Journal::open(&path).unwrap();
            assert_eq!((past.sent_stream, past.taken, journal.bytes()), (7, 3, 5), "{bytes} bytes");
            assert_eq!(std::fs::metadata(&path).unwrap().len(), bytes.max(BYTES));
        }
    }

    #[test]
    fn damaged_file_is_as_a_new_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        for content in [&b"short"[..], &[7; 48], &[7; FAR_NODE_WORDS * 8]] {
            std::fs::write(&path, content).unwrap();
            assert_eq!(Journal::open(&path).unwrap().1, Past::default());
        }
    }
}
