//! The rules of the driver: keys, lists of processes, and importers.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsRawFd, OwnedFd};

use crate::code;
use crate::wire::{KEY_BYTES, Packet};

/// Process ids that one key admits.
const PIDS_PER_KEY: usize = 32_768;

/// A process, as the kernel knows it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Caller {
    pub(crate) tgid: i32,
    /// Hundredths of a second after the machine's start.
    pub(crate) start_time: u64,
    /// Which connection: the process ends when its last one does.
    pub(crate) connection: u64,
}

#[derive(Debug)]
struct Node {
    owner: i32,
    owner_connection: u64,
    address: u64,
    device: i32,
    offset: u64,
    size: u64,
    memory: OwnedFd,
    /// Whether every process may open it.
    is_open: bool,
    /// When each process was admitted.
    list: HashMap<i32, u64>,
    /// Importers that have it open, by connection.
    opened: BTreeMap<u64, i32>,
}

#[derive(Debug, Default)]
pub(crate) struct Nodes {
    nodes: BTreeMap<[u8; KEY_BYTES], Node>,
    made: u64,
}

impl Nodes {
    /// A key is text: who, which, where, and zeros to the end. It is no secret.
    pub(crate) fn export(&mut self, caller: Caller, ask: &Packet, memory: OwnedFd) -> Result<Packet, i32> {
        self.made += 1;
        let text = format!("{:08x}{:016x}{:02x}{:02x}", caller.tgid, self.made, ask.device & 0xff, 0);
        let mut key = [b'0'; KEY_BYTES];
        key[..text.len()].copy_from_slice(text.as_bytes());
        key[KEY_BYTES - 1] = 0;
        let node = Node {
            owner: caller.tgid,
            owner_connection: caller.connection,
            address: ask.address,
            device: ask.device,
            offset: ask.offset,
            size: ask.size,
            memory,
            is_open: ask.flags == 1,
            list: HashMap::new(),
            opened: BTreeMap::new(),
        };
        self.nodes.insert(key, node);
        let mut answer = Packet::new(0);
        answer.key = key;
        Ok(answer)
    }

    pub(crate) fn admit(&mut self, caller: Caller, ask: &Packet, now: u64) -> Result<Packet, i32> {
        let node = self.nodes.get_mut(&ask.key).ok_or(code::DRIVER)?;
        if node.owner != caller.tgid {
            return Err(code::DRIVER);
        }
        if node.is_open {
            return Err(code::NOT_PERMITTED);
        }
        let named = ask.pids.iter().take(ask.count as usize);
        let mut admitted = 0;
        for pid in named.filter(|pid| **pid != 0 && **pid != caller.tgid) {
            if node.list.len() >= PIDS_PER_KEY && !node.list.contains_key(pid) {
                return Err(code::DRIVER);
            }
            // Again means from now on.
            node.list.insert(*pid, now);
            admitted += 1;
        }
        if admitted == 0 { Err(code::DRIVER) } else { Ok(Packet::new(0)) }
    }

    pub(crate) fn import(&mut self, caller: Caller, ask: &Packet) -> Result<(Packet, OwnedFd), i32> {
        let node = self.nodes.get_mut(&ask.key).ok_or(code::DRIVER)?;
        // A process that started after the number was put on the list is another one.
        let is_listed = || node.list.get(&caller.tgid).is_some_and(|set| caller.start_time <= *set);
        if !node.is_open && !is_listed() {
            return Err(code::DRIVER);
        }
        if node.opened.contains_key(&caller.connection) {
            return Err(code::DRIVER);
        }
        let fd = node.memory.try_clone().map_err(|_| code::OUT_OF_MEMORY)?;
        node.opened.insert(caller.connection, caller.tgid);
        let mut answer = Packet::new(0);
        (answer.offset, answer.size, answer.device) = (node.offset, node.size, node.device);
        Ok((answer, fd))
    }

    /// One call for both sides: a process that has it open closes that, and otherwise only the creator may destroy it.
    pub(crate) fn close(&mut self, caller: Caller, ask: &Packet) -> Result<Packet, i32> {
        let node = self.nodes.get_mut(&ask.key).ok_or(code::DRIVER)?;
        if node.opened.remove(&caller.connection).is_some() {
            return Ok(Packet::new(0));
        }
        if node.owner != caller.tgid {
            return Err(code::DRIVER);
        }
        self.destroy(|key, _| *key == ask.key);
        Ok(Packet::new(0))
    }

    /// Memory that is freed takes its keys with it.
    pub(crate) fn free(&mut self, caller: Caller, address: u64) -> Packet {
        self.destroy(|_, node| node.owner_connection == caller.connection && node.address == address);
        Packet::new(0)
    }

    /// A process has ended: what it had open is closed first, and then its keys are destroyed.
    pub(crate) fn ended(&mut self, connection: u64) {
        for node in self.nodes.values_mut() {
            node.opened.remove(&connection);
        }
        self.destroy(|_, node| node.owner_connection == connection);
    }

    fn destroy(&mut self, which: impl Fn(&[u8; KEY_BYTES], &Node) -> bool) {
        self.nodes.retain(|key, node| {
            let goes = which(key, node);
            if goes {
                // The importers' pages go: what they touch next is a fault.
                // SAFETY: the descriptor is open.
                unsafe { libc::ftruncate(node.memory.as_raw_fd(), 0) };
            }
            !goes
        });
    }

    /// The numbers on all lists.
    pub(crate) fn listed(&self) -> Vec<i32> {
        self.nodes.values().flat_map(|node| node.list.keys().copied()).collect()
    }

    /// Keys, and how often they are open.
    pub(crate) fn count(&self) -> (usize, usize) {
        (self.nodes.len(), self.nodes.values().map(|node| node.opened.len()).sum())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(tgid: i32, start_time: u64) -> Caller {
        Caller { tgid, start_time, connection: u64::try_from(tgid).unwrap() }
    }

    fn memory() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    fn exported(nodes: &mut Nodes, flags: u64) -> Packet {
        let mut ask = Packet::new(0);
        (ask.flags, ask.size) = (flags, 4096);
        nodes.export(caller(100, 1), &ask, memory()).unwrap()
    }

    fn listing(key: &Packet, pids: &[i32]) -> Packet {
        let mut ask = *key;
        ask.count = u32::try_from(pids.len()).unwrap();
        ask.pids[..pids.len()].copy_from_slice(pids);
        ask
    }

    #[test]
    fn keys_are_sequential() {
        let mut nodes = Nodes::default();
        let (first, second) = (exported(&mut nodes, 0), exported(&mut nodes, 0));
        assert_eq!(&first.key[..12], b"000000640000");
        assert_eq!((first.key[23], second.key[23], first.key[63], first.key[64]), (b'1', b'2', b'0', 0));
    }

    #[test]
    fn only_the_creator_admits_and_destroys() {
        let mut nodes = Nodes::default();
        let key = exported(&mut nodes, 0);
        assert_eq!(nodes.admit(caller(200, 1), &listing(&key, &[200]), 9).err(), Some(code::DRIVER));
        assert_eq!(nodes.close(caller(200, 1), &key).err(), Some(code::DRIVER));
        assert!(nodes.close(caller(100, 1), &key).is_ok());
        assert_eq!(nodes.close(caller(100, 1), &key).err(), Some(code::DRIVER));
    }

    #[test]
    fn admitting_0_or_the_creator_is_refused() {
        let mut nodes = Nodes::default();
        let key = exported(&mut nodes, 0);
        assert_eq!(nodes.admit(caller(100, 1), &listing(&key, &[0, 100]), 9).err(), Some(code::DRIVER));
        assert!(nodes.admit(caller(100, 1), &listing(&key, &[0, 200]), 9).is_ok());
    }

    #[test]
    fn whitelist_is_bounded_and_replaced_as_a_whole() {
        let mut nodes = Nodes::default();
        let key = exported(&mut nodes, 0);
        let last = i32::try_from(PIDS_PER_KEY).unwrap() + 1000;
        for pid in 1001..=last {
            nodes.admit(caller(100, 1), &listing(&key, &[pid]), 9).unwrap();
        }
        assert_eq!(nodes.admit(caller(100, 1), &listing(&key, &[last + 1]), 9).err(), Some(code::DRIVER));
        assert!(nodes.admit(caller(100, 1), &listing(&key, &[last]), 10).is_ok(), "it is on the list");
        assert_eq!(nodes.listed().len(), PIDS_PER_KEY);
    }

    #[test]
    fn freed_memory_is_unmapped_from_importers() {
        for way in ["close", "free", "exit"] {
            let mut nodes = Nodes::default();
            let mut ask = Packet::new(0);
            (ask.flags, ask.size, ask.address) = (1, 4096, 7 << 21);
            let memory = crate::memory::new_memory(4096).unwrap();
            let key = nodes.export(caller(100, 1), &ask, memory).unwrap();
            let (_, theirs) = nodes.import(caller(200, 1), &key).unwrap();
            let len = || std::fs::File::from(theirs.try_clone().unwrap()).metadata().unwrap().len();
            nodes.free(caller(200, 1), ask.address);
            nodes.free(caller(100, 1), 6 << 21);
            assert_eq!(len(), 4096, "that was not it");
            match way {
                "close" => drop(nodes.close(caller(100, 1), &key).unwrap()),
                "free" => drop(nodes.free(caller(100, 1), ask.address)),
                _ => nodes.ended(100),
            }
            assert_eq!((len(), nodes.count()), (0, (0, 0)), "{way}");
        }
    }

    #[test]
    fn process_that_reuses_a_pid_is_not_admitted() {
        let mut nodes = Nodes::default();
        let key = exported(&mut nodes, 0);
        nodes.admit(caller(100, 1), &listing(&key, &[200]), 50).unwrap();
        assert_eq!(nodes.import(caller(200, 51), &key).err(), Some(code::DRIVER));
        nodes.admit(caller(100, 1), &listing(&key, &[200]), 52).unwrap();
        assert!(nodes.import(caller(200, 51), &key).is_ok(), "setting it again renews it");
        assert_eq!(nodes.import(caller(200, 51), &key).err(), Some(code::DRIVER), "open once");
        assert_eq!(nodes.import(caller(300, 1), &key).err(), Some(code::DRIVER));
    }

    #[test]
    fn open_key_has_no_whitelist() {
        let mut nodes = Nodes::default();
        let key = exported(&mut nodes, 1);
        assert_eq!(nodes.admit(caller(100, 1), &listing(&key, &[200]), 9).err(), Some(code::NOT_PERMITTED));
        assert!(nodes.import(caller(200, 99), &key).is_ok());
    }

    #[test]
    fn imported_keys_end_before_exported_ones() {
        let mut nodes = Nodes::default();
        let key = exported(&mut nodes, 1);
        nodes.import(caller(200, 1), &key).unwrap();
        assert_eq!(nodes.count(), (1, 1));
        nodes.ended(200);
        assert_eq!(nodes.count(), (1, 0));
        nodes.ended(100);
        assert_eq!(nodes.count(), (0, 0));
    }
}
