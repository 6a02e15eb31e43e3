//! In virtual time: the machine alone, and all of it with the kubelet double.

mod double;
mod state_machine;
