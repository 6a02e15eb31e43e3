//! The sidecar of a pod.
//!
//! It will create the links of its pod, so that their memory is charged to it, hand segments, doorbells and device keys to
//! the processes that may have them, and notice deaths that pid namespaces hide from the processes of a link. It will
//! depend on `lib`, and not on `plugin`; it is not on the path of a message.
//!
//! Built so far: the [`broker`] of device keys, without the socket that feeds it.

pub mod broker;
