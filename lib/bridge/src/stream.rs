//! One direction of a link: its sender and its receiver, without the link and without a network.
//!
//! Every message has a number. The sender keeps an encoded copy until the other side has passed the message to its link, and sends it
//! again if it did not arrive. The receiver passes the numbers on in order, each once. A number that the sender can no longer send is
//! lost; the receiver counts it, and continues.
//!
//! Memory is bounded: the sender keeps at most what the receiver's limit and its own window allow, and [`MAX_BYTES`]. The receiver takes no more.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::engine::SentFrame;
use crate::frame::{ITEM_HEAD_BYTES, ItemHead, ItemKind, VERSIONS, set_receiver};

/// Bytes that one direction keeps at most, unless a single message is larger.
pub const MAX_BYTES: usize = 32 << 20;

/// Bytes that a frame takes in memory besides its own.
pub(crate) const FRAME_OVERHEAD: usize = 64;

/// Bytes that a frame takes in memory, with those that keep it.
pub(crate) fn weight(frame: &[u8]) -> usize {
    frame.len() + FRAME_OVERHEAD
}

/// Bytes of buffers that one direction keeps for its next messages.
const SPARE_BYTES: usize = 2 << 20;

/// The sending half of a direction.
#[derive(Debug)]
pub struct Sender {
    /// The version of the protocol that the other side gets.
    version: u16,
    stream: u64,
    /// The number of the next message.
    next: u64,
    /// The receiver takes numbers below this.
    limit: u64,
    /// Messages that may be kept, whatever the receiver takes.
    window: u64,
    /// Copies of the messages from `oldest` on.
    kept: VecDeque<SentFrame>,
    kept_bytes: usize,
    /// The number of the first copy.
    oldest: u64,
    /// Buffers of messages that were delivered, for the next ones.
    spare: Vec<SentFrame>,
    spare_bytes: usize,
}

impl Sender {
    /// Continues a stream after the last number that was taken.
    #[must_use]
    pub fn new(stream: u64, taken: u64) -> Self {
        let next = taken + 1;
        let (kept, spare) = (VecDeque::new(), Vec::new());
        let version = VERSIONS.lowest;
        Self {
            version,
            stream,
            next,
            limit: 0,
            window: 1,
            kept,
            kept_bytes: 0,
            oldest: next,
            spare,
            spare_bytes: 0,
        }
    }

    /// Messages of the link's shape may be kept here.
    pub fn set_window(&mut self, window: u64) {
        self.window = window.max(1);
    }

    /// Numbers below this may be sent. The other side says which it takes, and the memory of this one does not depend on that alone.
    fn limit(&self) -> u64 {
        self.limit.min(self.oldest.saturating_add(self.window))
    }

    /// The version of the protocol in which it writes.
    #[must_use]
    pub fn version(&self) -> u16 {
        self.version
    }

    /// Writes in another version from now on, also what it sends again.
    pub fn set_version(&mut self, version: u16) {
        self.version = version;
    }

    /// The number of the stream.
    #[must_use]
    pub fn stream(&self) -> u64 {
        self.stream
    }

    /// The number of the next message.
    #[must_use]
    pub fn next(&self) -> u64 {
        self.next
    }

    /// The lowest number that can be sent again; [`next`](Self::next) if there is none.
    #[must_use]
    pub fn oldest(&self) -> u64 {
        self.oldest
    }

    /// Whether another message may be taken.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.next < self.limit() && (self.kept.is_empty() || self.kept_bytes < MAX_BYTES)
    }

    /// Leaves out numbers, of messages that the link has lost.
    pub fn skip(&mut self, lost: u64) {
        if lost > 0 && self.kept.is_empty() {
            self.oldest += lost;
            self.next += lost;
        }
    }

    /// Adds a message and returns its frame. `head` gets its numbers, and `parts` appends the bytes of its parts.
    pub fn add(&mut self, head: ItemHead, parts: impl FnOnce(&mut Vec<u8>)) -> &SentFrame {
        let mut frame = self.spare.pop().unwrap_or_default();
        self.spare_bytes -= frame.capacity();
        let head = ItemHead { stream: self.stream, number: self.next, oldest: self.oldest, ..head };
        // The engine has done with it, or it would be no spare one.
        let buffer = Arc::make_mut(&mut frame);
        buffer.clear();
        head.encode(self.version, buffer);
        parts(buffer);
        self.kept_bytes += weight(&frame);
        self.kept.push_back(frame);
        self.next += 1;
        self.kept.back().expect("it was pushed")
    }

    /// The receiver has delivered everything up to `delivered`, and takes numbers below `limit`.
    pub fn acknowledge(&mut self, known_stream: u64, delivered: u64, limit: u64) {
        if known_stream != self.stream {
            // It does not know this stream yet. Until it does, nothing is taken that it could not count as lost.
            self.limit = self.oldest;
            return;
        }
        self.limit = limit;
        while self.oldest <= delivered
            && let Some(mut frame) = self.kept.pop_front()
        {
            self.oldest += 1;
            self.kept_bytes -= weight(&frame);
            // As many as a stream at full speed needs. Others go back to the allocator.
            let is_kept =
                self.spare_bytes + frame.capacity() <= SPARE_BYTES && Arc::get_mut(&mut frame).is_some();
            if is_kept {
                self.spare_bytes += frame.capacity();
                self.spare.push(frame);
            }
        }
    }

    /// The frames after the number `received`, to be sent again, to the process `to`.
    pub fn again(&mut self, to: u64, received: u64) -> impl Iterator<Item = &SentFrame> {
        let (version, oldest, limit) = (self.version, self.oldest, self.limit());
        let numbered = self.kept.iter_mut().zip(oldest..limit);
        numbered.filter(move |(_, number)| *number > received).map(move |(frame, _)| {
            set_receiver(Arc::<Vec<u8>>::make_mut(frame), version, to, oldest);
            &*frame
        })
    }

    /// Whether everything was delivered.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.kept.is_empty()
    }
}

/// A message that was received and not delivered yet.
#[derive(Debug)]
pub struct ReceivedItem {
    /// The head of the message.
    pub head: ItemHead,
    frame: Vec<u8>,
    /// Whether it is a post that was passed on before its turn.
    pub is_done: bool,
}

impl ReceivedItem {
    /// The bytes of the whole frame.
    #[must_use]
    pub fn frame(&self) -> &[u8] {
        &self.frame
    }
}

/// The result of receiving a frame.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Arrival {
    /// It is the next one, after `lost` which can no longer come.
    Next {
        /// Messages that are lost.
        lost: u64,
    },
    /// It was received before.
    Old,
    /// Others before it are missing, and can be sent again.
    Early,
    /// It is beyond the limit.
    Beyond,
}

/// The receiving half of a direction.
#[derive(Debug)]
pub struct Receiver {
    stream: u64,
    /// The last number that was passed to the link.
    delivered: u64,
    /// The stream before, and its last number: two homes of one link may answer in turn.
    earlier: (u64, u64),
    waiting: VecDeque<ReceivedItem>,
    waiting_bytes: usize,
    /// Messages that may wait here.
    window: u64,
}

impl Receiver {
    /// Continues the stream after the last number that was delivered.
    #[must_use]
    pub fn new(stream: u64, delivered: u64, window: u64) -> Self {
        Self { stream, delivered, earlier: (0, 0), waiting: VecDeque::new(), waiting_bytes: 0, window }
    }

    /// The stream that is received; 0: none yet.
    #[must_use]
    pub fn stream(&self) -> u64 {
        self.stream
    }

    /// The last number that was delivered.
    #[must_use]
    pub fn delivered(&self) -> u64 {
        self.delivered
    }

    /// The last number that was received.
    #[must_use]
    pub fn received(&self) -> u64 {
        self.delivered + self.waiting.len() as u64
    }

    /// Bytes of the messages that were received and not delivered yet.
    #[must_use]
    pub fn waiting_bytes(&self) -> usize {
        self.waiting_bytes
    }

    /// The sender may send numbers below this.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.delivered + 1 + self.window
    }

    /// Messages of the link's shape may wait here.
    pub fn set_window(&mut self, window: u64) {
        self.window = window.max(1);
    }

    /// Begins to receive another stream, with the number `oldest`, as soon as all of the last one is delivered. Returns whether it did.
    pub fn adopt(&mut self, stream: u64, oldest: u64) -> bool {
        let is_new = stream != self.stream && self.waiting.is_empty();
        if is_new {
            let delivered = if stream == self.earlier.0 { self.earlier.1 } else { oldest - 1 };
            self.earlier = (self.stream, self.delivered);
            (self.stream, self.delivered) = (stream, delivered);
        }
        is_new
    }

    /// Takes a frame of the stream, which has this head.
    pub fn accept(&mut self, head: ItemHead, frame: Vec<u8>) -> Arrival {
        if head.stream != self.stream {
            return Arrival::Early;
        }
        let expected = self.received() + 1;
        if head.number < expected {
            return Arrival::Old;
        }
        if head.number >= self.limit() {
            return Arrival::Beyond;
        }
        // What the sender still has will come. The rest never will.
        let lost = head.oldest.saturating_sub(expected);
        if head.number > expected + lost {
            return Arrival::Early;
        }
        if lost > 0 && !self.waiting.is_empty() {
            // The numbers of what waits count on without a gap, so it is delivered first.
            return Arrival::Early;
        }
        if self.waiting_bytes > 0 && self.waiting_bytes + frame.len() > MAX_BYTES + ITEM_HEAD_BYTES {
            return Arrival::Beyond;
        }
        self.delivered += lost;
        self.waiting_bytes += frame.len();
        self.waiting.push_back(ReceivedItem { head, frame, is_done: false });
        Arrival::Next { lost }
    }

    /// Whether this message is the next to be delivered, with nothing that waits before it.
    #[must_use]
    pub fn is_next(&self, head: &ItemHead) -> bool {
        head.stream == self.stream && head.number == self.delivered + 1 && self.waiting.is_empty()
    }

    /// The [next](Self::is_next) message was delivered without waiting here.
    pub fn pass(&mut self) {
        debug_assert!(self.waiting.is_empty());
        self.delivered += 1;
    }

    /// Numbers below `oldest` will never come. Returns how many are lost.
    pub fn give_up_before(&mut self, stream: u64, oldest: u64) -> u64 {
        if stream != self.stream || !self.waiting.is_empty() {
            return 0;
        }
        let lost = oldest.saturating_sub(self.delivered + 1);
        self.delivered += lost;
        lost
    }

    /// The oldest message that was not delivered yet.
    #[must_use]
    pub fn front(&self) -> Option<&ReceivedItem> {
        self.waiting.front()
    }

    /// The oldest post that was not passed on yet. It counts as passed on from now.
    pub fn take_post(&mut self) -> bool {
        let is_post =
            |received: &&mut ReceivedItem| received.head.kind == ItemKind::Post && !received.is_done;
        let post = self.waiting.iter_mut().find(is_post);
        post.map(|post| post.is_done = true).is_some()
    }

    /// The oldest message was delivered.
    pub fn pop(&mut self) {
        if let Some(received) = self.waiting.pop_front() {
            self.delivered += 1;
            self.waiting_bytes -= received.frame.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::frame::Frame;

    fn head() -> ItemHead {
        ItemHead { msg_len: 8, ..ItemHead::new(ItemKind::Inline, 0) }
    }

    /// A sender, a receiver, frames on their way, and what came out.
    struct TestLine {
        sender: Sender,
        receiver: Receiver,
        way: Vec<Vec<u8>>,
        out: Vec<u64>,
        lost: u64,
        made: u64,
        /// Messages that died with a sender.
        dropped: BTreeMap<u64, ()>,
    }

    impl TestLine {
        fn new(window: u64) -> Self {
            let mut sender = Sender::new(7, 0);
            sender.set_window(window);
            Self {
                sender,
                receiver: Receiver::new(0, 0, window),
                way: Vec::new(),
                out: Vec::new(),
                lost: 0,
                made: 0,
                dropped: BTreeMap::new(),
            }
        }

        fn make(&mut self) {
            if self.sender.has_room() {
                self.made += 1;
                let bytes = self.made.to_le_bytes();
                let frame = self.sender.add(head(), |frame| frame.extend_from_slice(&bytes)).to_vec();
                self.way.push(frame);
            }
        }

        fn arrive(&mut self, at: usize, stays: bool) {
            if self.way.is_empty() {
                return;
            }
            let at = at % self.way.len();
            let frame = if stays { self.way[at].clone() } else { self.way.remove(at) };
            let Ok(Frame::Item(head, _)) = Frame::decode(&frame, VERSIONS) else { panic!("it is damaged") };
            if let Arrival::Next { lost } = self.receiver.accept(head, frame) {
                self.lost += lost;
            }
        }

        fn deliver(&mut self) {
            if let Some(received) = self.receiver.front() {
                self.out.push(u64::from_le_bytes(received.frame()[ITEM_HEAD_BYTES..].try_into().unwrap()));
                self.receiver.pop();
            }
        }

        fn acknowledge(&mut self) {
            self.receiver.adopt(self.sender.stream(), self.sender.oldest());
            let receiver = &self.receiver;
            self.sender.acknowledge(receiver.stream(), receiver.delivered(), receiver.limit());
        }

        fn again(&mut self) {
            let known = self.receiver.stream() == self.sender.stream();
            let received = if known { self.receiver.received() } else { 0 };
            self.way.extend(self.sender.again(1, received).map(|frame| frame.to_vec()));
        }

        /// The sender is killed: what it kept is gone, and its journal has the last number.
        fn kill_sender(&mut self) {
            let taken = self.sender.next() - 1;
            for number in self.sender.oldest()..=taken {
                self.dropped.insert(number, ());
            }
            self.sender = Sender::new(self.sender.stream(), taken);
            self.sender.set_window(WINDOW);
        }

        /// The receiver is killed: its journal has the last number that was delivered.
        fn kill_receiver(&mut self, window: u64) {
            self.receiver = Receiver::new(self.receiver.stream(), self.receiver.delivered(), window);
        }

        /// Everything that can still arrive does.
        fn finish(&mut self) {
            for _ in 0..4 * WINDOW {
                self.acknowledge();
                self.again();
                for _ in 0..self.way.len() {
                    self.arrive(0, false);
                }
                while self.receiver.front().is_some() {
                    self.deliver();
                }
            }
            let (stream, oldest) = (self.sender.stream(), self.sender.oldest());
            self.lost += self.receiver.give_up_before(stream, oldest);
        }
    }

    const WINDOW: u64 = 5;

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Make,
        Arrive(usize),
        Double(usize),
        Lose(usize),
        Deliver,
        Acknowledge,
        Again,
        KillSender,
        KillReceiver,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            6 => Just(Step::Make),
            6 => (0_usize..8).prop_map(Step::Arrive),
            1 => (0_usize..8).prop_map(Step::Double),
            1 => (0_usize..8).prop_map(Step::Lose),
            6 => Just(Step::Deliver),
            3 => Just(Step::Acknowledge),
            1 => Just(Step::Again),
            1 => Just(Step::KillSender),
            1 => Just(Step::KillReceiver),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn messages_arrive_once_in_order_or_are_counted(steps in proptest::collection::vec(step(), 0..120)) {
            let mut line = TestLine::new(WINDOW);
            for step in steps {
                match step {
                    Step::Make => line.make(),
                    Step::Arrive(at) => line.arrive(at, false),
                    Step::Double(at) => line.arrive(at, true),
                    Step::Lose(at) if !line.way.is_empty() => {
                        let at = at % line.way.len();
                        line.way.remove(at);
                    }
                    Step::Lose(_) => {}
                    Step::Deliver => line.deliver(),
                    Step::Acknowledge => line.acknowledge(),
                    Step::Again => line.again(),
                    Step::KillSender => line.kill_sender(),
                    Step::KillReceiver => line.kill_receiver(WINDOW),
                }
                prop_assert!(line.receiver.received() < line.receiver.limit());
            }
            line.finish();
            prop_assert!(line.out.is_sorted_by(|a, b| a < b), "doubled or out of order: {:?}", line.out);
            prop_assert_eq!(line.out.len() as u64 + line.lost, line.made, "{:?}", line.out);
            for number in 1..=line.made {
                let arrived = line.out.binary_search(&number).is_ok();
                prop_assert!(arrived || line.dropped.contains_key(&number), "{} is lost though its sender lives", number);
            }
        }
    }

    #[test]
    fn sender_keeps_what_the_limits_allow() {
        let mut sender = Sender::new(1, 0);
        sender.set_window(1_000_000);
        assert!(!sender.has_room(), "nothing is allowed yet");
        sender.acknowledge(0, 0, 1_000_000);
        assert!(!sender.has_room(), "the receiver does not know the stream");
        sender.acknowledge(1, 0, 1_000_000);
        let megabyte = vec![0; 1 << 20];
        let mut sent = 0;
        while sender.has_room() {
            sender.add(ItemHead { msg_len: 1 << 20, ..head() }, |frame| frame.extend_from_slice(&megabyte));
            sent += 1;
        }
        assert_eq!(sent, MAX_BYTES >> 20);
    }

    /// The other side takes any number, and acknowledges nothing, or what was never sent.
    #[test]
    fn sender_keeps_its_own_window_whatever_the_receiver_takes() {
        let mut sender = Sender::new(1, 0);
        sender.set_window(4);
        let mut fill = |delivered, limit| {
            sender.acknowledge(1, delivered, limit);
            std::iter::from_fn(|| sender.has_room().then(|| sender.add(head(), |_| ()).len())).count()
        };
        assert_eq!(fill(0, 1 << 61), 4);
        assert_eq!(fill(0, 1 << 61), 0);
        assert_eq!(fill(3, 1 << 61), 3);
        assert_eq!(fill(1 << 60, 1 << 61), 4);
        assert_eq!(fill(1 << 60, 12), 0, "the last number below this limit was sent");
    }

    #[test]
    fn frames_beyond_the_limit_are_refused() {
        let mut receiver = Receiver::new(0, 0, 2);
        assert!(receiver.adopt(3, 1) && !receiver.adopt(3, 5));
        let item = |number| ItemHead { stream: 3, number, oldest: 1, msg_len: 0, ..head() };
        assert_eq!(receiver.accept(item(1), Vec::new()), Arrival::Next { lost: 0 });
        assert_eq!(receiver.accept(item(2), Vec::new()), Arrival::Next { lost: 0 });
        assert_eq!(receiver.accept(item(3), Vec::new()), Arrival::Beyond);
        assert_eq!(receiver.accept(item(1), Vec::new()), Arrival::Old);
        receiver.pop();
        assert_eq!(receiver.accept(item(3), Vec::new()), Arrival::Next { lost: 0 });
    }
}
