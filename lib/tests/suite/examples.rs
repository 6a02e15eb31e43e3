//! The examples of the library, each run once.

macro_rules! examples {
    ($($name:ident: $path:literal),+ $(,)?) => {
        $(
            #[path = $path]
            mod $name;
        )+

        #[test]
        fn examples_run() {
            let _watchdog = shmesh_testing::Watchdog::start();
            $($name::main().expect(stringify!($name));)+
        }
    };
}

examples! {
    async_link: "../../examples/async_link.rs",
    broadcast: "../../examples/broadcast.rs",
    epoll: "../../examples/epoll.rs",
    latest_value: "../../examples/latest_value.rs",
    many_links: "../../examples/many_links.rs",
    reconnect: "../../examples/reconnect.rs",
    request_reply: "../../examples/request_reply.rs",
    stream: "../../examples/stream.rs",
    typed: "../../examples/typed.rs",
    typed_request: "../../examples/typed_request.rs",
}

#[path = "../../examples/quickstart.rs"]
mod quickstart;

/// It uses the default IPC directory.
#[test]
fn readme_shows_the_quickstart_and_it_runs() {
    let dir = shmesh_testing::ipc_dir();
    let command = || {
        let mut command = shmesh_testing::this_test();
        command.env("SHMESH_DIR", dir.path());
        command
    };
    let ran = shmesh_testing::own_process_by(command, || quickstart::main().expect("the quickstart"));
    let Some(output) = ran else { return };
    assert!(shmesh_testing::passed(&output), "{output:?}");
    let printed = String::from_utf8_lossy(&output.stdout);
    for line in ["7 hello + 65536 bytes\n", "8 up to 112 bytes in the slot + 0 bytes\n"] {
        assert!(printed.contains(line), "{printed}");
    }
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    let readme = std::fs::read_to_string(format!("{root}/README.md")).expect("the README");
    let (_, program) = include_str!("../../examples/quickstart.rs").split_once("\n\n").expect("a header");
    let program = program.replace("pub(crate) fn", "fn");
    assert!(
        readme.contains(&format!("```rust\n{program}```\n")),
        "README.md does not show lib/examples/quickstart.rs"
    );
}
