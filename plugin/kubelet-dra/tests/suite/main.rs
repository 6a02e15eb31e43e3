//! A driver over real unix sockets, called as the kubelet calls it, and its slices and reports in a double of the API server.

mod node;
mod scale;
mod slices;
mod soak;
mod statuses;
mod support;

/// The README shows the example as it is compiled.
#[test]
fn readme_has_the_example() {
    let (_, example) =
        include_str!("../../examples/driver.rs").split_once("\n\n").expect("a first line of documentation");
    assert!(include_str!("../../README.md").contains(&format!("```rust,no_run\n{example}```")));
}
