//! Any files under the names of a link: they are refused with a reason, or opened and used within bounds.
#![no_main]

mod support;

use std::sync::OnceLock;

use shmesh::{LinkOptions, Side};
use support::{Bytes, FILES, call, clear, config, dir};

/// The files of an empty link, of each kind.
fn templates() -> &'static [Vec<Vec<u8>>; 2] {
    static TEMPLATES: OnceLock<[Vec<Vec<u8>>; 2]> = OnceLock::new();
    TEMPLATES.get_or_init(|| {
        [false, true].map(|single| {
            clear();
            let _link = LinkOptions::new().dir(dir()).create(&config(single, false)).expect("a link");
            FILES.iter().map(|name| std::fs::read(dir().join(name)).expect("a segment")).collect()
        })
    })
}

/// The matching checksum, as in `segment/header.rs`.
fn checksum(header: &[u8]) -> u64 {
    header.as_chunks::<8>().0.iter().take(15).fold(0xcbf2_9ce4_8422_2325, |sum, word| {
        (sum ^ u64::from_le_bytes(*word)).wrapping_mul(0x0100_0000_01b3)
    })
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let mut bytes = Bytes(input);
    let flags = bytes.byte();
    let mut files = templates()[usize::from(flags & 1)].clone();
    clear();
    if flags & 2 != 0 {
        // Not a header at all.
        files[0] = bytes.0.to_vec();
    }
    for _ in 0..bytes.byte() % 8 {
        let which = bytes.byte();
        let file = &mut files[usize::from(which & 3)];
        let at = usize::from(bytes.byte() % 16) * 8;
        if let Some(word) = file.get_mut(at..at + 8) {
            let old = u64::from_le_bytes(word.try_into().expect("8 bytes"));
            word.copy_from_slice(&bytes.value(old).to_le_bytes());
        }
        if which & 4 != 0 && file.len() >= 128 {
            let sum = checksum(&file[..120]);
            file[120..128].copy_from_slice(&sum.to_le_bytes());
        }
        if which & 0x18 == 0x18 {
            // Shorter or longer, by pages and a bit.
            let pages = usize::from(bytes.byte() % 32);
            file.resize(pages * 4096 + usize::from(bytes.byte() % 2), 0);
        }
    }
    for (name, content) in FILES.iter().zip(&files) {
        if flags & 4 == 0 || !content.is_empty() {
            std::fs::write(dir().join(name), content).expect("a file");
        }
    }
    let side = if flags & 8 == 0 { Side::Secondary } else { Side::Primary };
    let options = LinkOptions::new().dir(dir());
    let opened = if flags & 16 == 0 {
        options.attach("link", side)
    } else {
        options.create(&config(flags & 1 != 0, false))
    };
    match opened {
        Ok(link) => {
            while !bytes.is_empty() {
                let which = bytes.byte();
                call(&link, which, &mut bytes);
            }
        }
        Err(error) => assert!(error.to_string().starts_with("link link: "), "{error}"),
    }
});
