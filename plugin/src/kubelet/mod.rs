//! One resource and the kubelet.
//!
//! | file | concept |
//! |---|---|
//! | `machine.rs` | when to listen, when to register, when to wait; pure |

mod machine;

#[cfg(test)]
mod tests;
