//! Image files of every kind: `.sif`, squashfs, and tars that are an image of layers or a layer, packed or not.
//!
//! No bytes may panic, take more than the limits allow, or have anything made but in the folder that they are unpacked to.

#![no_main]

use std::{fs, path::PathBuf, process, sync::LazyLock};

use libfuzzer_sys::fuzz_target;
use prorl_sandbox::images::fuzzing::{self, MAX_BYTES, MAX_ENTRIES};

/// Where all happens; in TMPDIR, for whoever set that to remove.
static PLACE: LazyLock<PathBuf> = LazyLock::new(|| {
    let place = std::env::temp_dir().join(format!("prorl-fuzz-{}", process::id()));
    fs::create_dir(&place).expect("TMPDIR takes folders");
    place
});

fuzz_target!(|data: &[u8]| {
    let image = PLACE.join("image");
    fs::write(&image, data).expect("TMPDIR takes files");
    for unpack in [fuzzing::unpack, fuzzing::lay] {
        let made = unpack(&image, &PLACE);
        let mut names: Vec<_> = fs::read_dir(&*PLACE)
            .expect("it is still there")
            .map(|entry| entry.expect("a name").file_name())
            .filter(|name| name != "image" && name != "root" && name != "removed" && name != "archive.tar")
            .collect();
        names.sort();
        assert!(names.is_empty(), "made beside the root: {names:?}");
        if let Ok((entries, bytes)) = made {
            assert!(entries <= MAX_ENTRIES && bytes <= MAX_BYTES, "{entries} entries, {bytes} bytes");
        }
        fuzzing::clear(&PLACE);
    }
});
