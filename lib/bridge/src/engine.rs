//! Carries frames between bridges: the interface, and an engine for tests.

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;

/// Called with the name of the far node that a frame is from, and its bytes, in the pieces in which the network has them. From any thread;
/// it must not wait.
pub type OnFrame = Arc<dyn Fn(&str, &[&[u8]]) + Send + Sync>;

/// An encoded frame that is sent. The stream and the engine share it, so that it is not copied for either.
pub type SentFrame = Arc<Vec<u8>>;

/// Called with the name of a bridge that has the link, `<place>/<number>`, and whether it has come or gone.
pub type OnPlace = Arc<dyn Fn(&str, bool) + Send + Sync>;

/// Looks up network addresses, which may take seconds.
pub type AddressLookup = Box<dyn Fn() -> Vec<String> + Send>;

/// Keeps an announcement or a watch until it is dropped.
pub type Guard = Box<dyn Any + Send + Sync>;

/// Carries frames between the bridge that has the link and the far nodes.
///
/// Frames may be lost, doubled or overtaken whenever a connection fails; the streams put that right. An engine limits what it keeps by
/// making [`put`](Outlet::put) wait; the streams' limits keep that short.
pub trait Engine: fmt::Debug + Send + Sync {
    /// Opens the end that has the link: frames of all far nodes come to it.
    ///
    /// # Errors
    /// The engine cannot listen.
    fn open_home(&self, link: &str, on_frame: OnFrame) -> Result<Box<dyn Outlet>>;

    /// Opens the end of a far node.
    ///
    /// # Errors
    /// The engine cannot listen.
    fn open_far(&self, link: &str, node: &str, on_frame: OnFrame) -> Result<Box<dyn Outlet>>;

    /// Says to all far nodes that the link is at this place, until the guard is dropped or the process ends.
    ///
    /// # Errors
    /// The engine cannot send.
    fn announce(&self, link: &str, place: &str) -> Result<Guard>;

    /// Watches where the link is: calls `on_place` for each announcement that there is, that comes, or that ends.
    ///
    /// # Errors
    /// The engine cannot listen.
    fn watch(&self, link: &str, on_place: OnPlace) -> Result<Guard>;

    /// Returns how the network addresses of bridges that have the link are looked up.
    fn addresses(&self, _link: &str) -> AddressLookup {
        Box::new(Vec::new)
    }
}

/// Where frames go out.
pub trait Outlet: fmt::Debug + Send + Sync {
    /// Sends a frame to the far node, or from it. It may get lost.
    ///
    /// # Errors
    /// The engine has ended.
    fn put(&self, node: &str, frame: &SentFrame) -> Result<()>;

    /// Sends a frame to a far node that may be none, also from a callback: it does not wait for room, and keeps nothing for the node.
    ///
    /// # Errors
    /// The engine has ended.
    fn put_or_drop(&self, node: &str, frame: &SentFrame) -> Result<()>;

    /// Drops what is kept for sending to this node. It may wait.
    fn forget(&self, _node: &str) {}
}

/// The way of a frame in an engine for tests.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Fate {
    /// It arrives, once and in its turn.
    Arrives,
    /// It is lost on the way.
    Lost,
    /// It arrives twice in a row.
    Twice,
    /// It arrives after the next one.
    Late,
}

type LateFrame = (OnFrame, String, Vec<u8>);
type Ends = HashMap<(String, String), OnFrame>;

#[derive(Default)]
struct MemoryPlaces {
    count: u64,
    /// Links and names of the announcements.
    announced: BTreeMap<u64, (String, String)>,
    watches: BTreeMap<u64, (String, OnPlace)>,
}

impl MemoryPlaces {
    fn tell(&self, link: &str, name: &str, is_there: bool) {
        for (_, on_place) in self.watches.values().filter(|(watched, _)| watched == link) {
            on_place(name, is_there);
        }
    }
}

/// An announcement or a watch of an engine for tests.
struct MemoryGuard {
    places: Arc<Mutex<MemoryPlaces>>,
    number: u64,
}

impl Drop for MemoryGuard {
    fn drop(&mut self) {
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        places.watches.remove(&self.number);
        if let Some((link, name)) = places.announced.remove(&self.number) {
            places.tell(&link, &name, false);
        }
    }
}

/// An engine within one process, for tests: it can lose, double and reorder frames.
#[derive(Clone)]
pub struct MemoryEngine {
    ends: Arc<Mutex<Ends>>,
    late: Arc<Mutex<Option<LateFrame>>>,
    places: Arc<Mutex<MemoryPlaces>>,
    fate: Arc<dyn Fn() -> Fate + Send + Sync>,
}

impl MemoryEngine {
    /// An engine that asks `fate` for each frame.
    pub fn new(fate: impl Fn() -> Fate + Send + Sync + 'static) -> Self {
        Self { ends: Arc::default(), late: Arc::default(), places: Arc::default(), fate: Arc::new(fate) }
    }

    fn open(&self, link: &str, end: &str, on_frame: OnFrame) -> Box<dyn Outlet> {
        let mut ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        ends.insert((link.to_owned(), end.to_owned()), on_frame);
        Box::new(MemoryOutlet { engine: self.clone(), link: link.to_owned(), is_home: end == HOME })
    }
}

/// Bytes of the first piece of a frame, in the middle of a long MSG part.
const FIRST_PIECE: usize = 150;

/// No node has an empty name.
const HOME: &str = "";

impl fmt::Debug for MemoryEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryEngine").finish_non_exhaustive()
    }
}

impl Engine for MemoryEngine {
    fn open_home(&self, link: &str, on_frame: OnFrame) -> Result<Box<dyn Outlet>> {
        Ok(self.open(link, HOME, on_frame))
    }

    fn open_far(&self, link: &str, node: &str, on_frame: OnFrame) -> Result<Box<dyn Outlet>> {
        Ok(self.open(link, node, on_frame))
    }

    fn announce(&self, link: &str, place: &str) -> Result<Guard> {
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        places.count += 1;
        let number = places.count;
        let name = format!("{place}/{number}");
        places.tell(link, &name, true);
        places.announced.insert(number, (link.to_owned(), name));
        Ok(Box::new(MemoryGuard { places: Arc::clone(&self.places), number }))
    }

    fn watch(&self, link: &str, on_place: OnPlace) -> Result<Guard> {
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        places.count += 1;
        let number = places.count;
        for (_, name) in places.announced.values().filter(|(announced, _)| announced == link) {
            on_place(name, true);
        }
        places.watches.insert(number, (link.to_owned(), on_place));
        Ok(Box::new(MemoryGuard { places: Arc::clone(&self.places), number }))
    }
}

#[derive(Debug)]
struct MemoryOutlet {
    engine: MemoryEngine,
    link: String,
    is_home: bool,
}

impl Outlet for MemoryOutlet {
    fn put(&self, node: &str, frame: &SentFrame) -> Result<()> {
        let end = if self.is_home { node } else { HOME };
        let ends = self.engine.ends.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(to) = ends.get(&(self.link.clone(), end.to_owned())).cloned() else { return Ok(()) };
        drop(ends);
        let overtaken = self.engine.late.lock().unwrap_or_else(PoisonError::into_inner).take();
        // As a network: a long frame is in two pieces.
        let pieces: [&[u8]; 2] = frame.split_at(frame.len().min(FIRST_PIECE)).into();
        match (self.engine.fate)() {
            Fate::Arrives => to(node, &pieces),
            Fate::Lost => {}
            Fate::Twice => {
                to(node, &pieces);
                to(node, &pieces);
            }
            Fate::Late => {
                *self.engine.late.lock().unwrap_or_else(PoisonError::into_inner) =
                    Some((to, node.to_owned(), frame.to_vec()));
            }
        }
        if let Some((to, node, frame)) = overtaken {
            to(&node, &[&frame]);
        }
        Ok(())
    }

    fn put_or_drop(&self, node: &str, frame: &SentFrame) -> Result<()> {
        self.put(node, frame)
    }
}
