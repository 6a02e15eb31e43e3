//! Sockets whose close lingers.

use std::net::{TcpListener, TcpStream};

use nix::sys::socket::{setsockopt, sockopt};

/// Creates sockets with unsent data, whose close waits ten minutes for it to be sent.
#[derive(Debug)]
pub struct Stubborn {
    listener: TcpListener,
    others: Vec<TcpStream>,
}

impl Stubborn {
    /// Listens for the other ends.
    pub fn listen() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        // The other end never has room for the data.
        setsockopt(&listener, sockopt::RcvBuf, &4096).unwrap();
        Self { listener, others: Vec::new() }
    }

    /// Creates one of them.
    pub fn one(&mut self) -> TcpStream {
        let stream = TcpStream::connect(self.listener.local_addr().unwrap()).unwrap();
        self.others.push(self.listener.accept().unwrap().0);
        setsockopt(&stream, sockopt::Linger, &libc::linger { l_onoff: 1, l_linger: 600 }).unwrap();
        stream.set_nonblocking(true).unwrap();
        while std::io::Write::write(&mut &stream, &[0; 65_536]).is_ok() {}
        stream
    }
}
