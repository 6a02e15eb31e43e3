//! GPU and NPU memory between real processes in real namespaces, brokered by a real sidecar, with fakes of the vendors'
//! libraries. Those of GPU memory also run on a GPU: see docs/testing.md.

pub(crate) mod ascend;
pub(crate) mod cuda;
mod kills;
pub(crate) mod peer;
mod pools;

pub(crate) use peer::serve;
