//! A peer that writes any value anywhere between any two calls: each call returns, and stays within bounds.
#![no_main]

mod support;

use std::fs::File;
use std::os::unix::fs::FileExt;

use shmesh::{LinkOptions, Side};
use support::{Bytes, FILES, call, clear, config, dir};

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let mut bytes = Bytes(input);
    let flags = bytes.byte();
    clear();
    let options = LinkOptions::new().dir(dir());
    // With notification in one of eight.
    let link = options.create(&config(flags & 1 != 0, flags & 0b1110 == 0b1110));
    let Ok(primary) = link else { panic!("{}", link.unwrap_err()) };
    let secondary = options.attach("link", Side::Secondary).expect("it was just created");
    // The same pages that are mapped.
    let files = FILES.map(|name| {
        let file = File::options().read(true).write(true).open(dir().join(name)).expect("the segment");
        let len = file.metadata().expect("its size").len();
        (file, len)
    });
    while !bytes.is_empty() {
        let which = bytes.byte();
        match which >> 6 {
            0 => {
                let (file, len) = &files[usize::from(which & 3)];
                // All tables lie before the payload, which starts after a page or a few.
                let at = u64::from(bytes.half()) * 8 % len;
                let mut old = [0; 8];
                file.read_exact_at(&mut old, at).expect("inside the file");
                let new = bytes.value(u64::from_le_bytes(old));
                file.write_all_at(&new.to_le_bytes(), at).expect("inside the file");
            }
            1 => call(&secondary, which, &mut bytes),
            _ => call(&primary, which, &mut bytes),
        }
    }
});
