//! The device plugin as a process, and a kubelet double. Real sockets, real time.

mod after_pods_end;
mod events;
mod gives;
mod hostile;
mod plugin;
mod random;
mod refuses;
mod rollout;
mod survives;

pub(crate) use plugin::{LIMIT, Plugin, TestNode, until};
