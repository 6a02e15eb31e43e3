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
