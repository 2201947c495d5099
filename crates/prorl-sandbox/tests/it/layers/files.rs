//! What is kept of files, and what each sandbox has for itself.

use tokio::task::JoinSet;

use super::{Field, outside};
use crate::support::Live;

/// Changes all that an ordinary user may change anywhere.
const CHANGES: &str = r#"
set -e
cd /workspace
echo hello > written; echo more >> written; chmod 4755 written
mkdir -p deep/er sticky group shut; echo x > deep/er/file; chmod 1777 sticky; chmod 2775 group
echo in > shut/in; chmod 0000 shut; echo closed > closed; chmod 0000 closed
ln written linked; ln written deep/linked; ln -s written soft; ln -s /nowhere dangling; mkfifo -m 640 fifo
truncate -s 64M sparse; printf end >> sparse; truncate -s 100M empty
long=$(printf '%0255d' 0); echo long > "$long"; echo bytes > "$(printf 'a\377\376 b')"; echo line > 'two
lines'
touch -d '2001-02-03 04:05:06.123456789' old deep
mkdir /newtop; echo top > /newtop/file; echo file > /topfile; ln -s newtop /toplink
echo home > ~/note; mkdir -p /var/tmp/x; echo y > /var/tmp/x/y
echo gone > fleeting; rm fleeting
if command -v perl >/dev/null; then
    PERL_BADLANG=0 perl -e 'my ($n, $v) = ("user.task", "a\0b");
        syscall('$SETXATTR', $ARGV[0], $n, $v, 3, 0) == 0 or die $!;
        socket(S, 1, 1, 0) && bind(S, pack("Sa*", 1, "socket")) or die $!' written
fi
"#;

/// Changes what an image has.
const IMAGE_CHANGES: &str = "
set -e
echo more >> /etc/settings; chmod 640 /etc/settings
rm -r /var/data; mkdir /var/data; echo new > /var/data/new
rm /var/missing; mkdir /var/missing; echo in > /var/missing/in
mv /usr/share /usr/moved; rm /var/upwards; ln -s data /var/upwards; rm /bin/umount; mv /bin/unshare /bin/renamed
rm /share; mkdir -p /usr/local/bin; echo tool > /usr/local/bin/tool
";

/// What a fake root does beside.
const ROOT_CHANGES: &str = "
set -e
echo tool > /usr/bin/prorl-tool; chmod 755 /usr/bin/prorl-tool; mkdir /usr/lib/prorl; echo x > /usr/lib/prorl/x
rm /usr/bin/head
";

fn setxattr() -> u32 {
    if cfg!(target_arch = "x86_64") { 188 } else { 5 }
}

/// What there is to see in a sandbox.
async fn seen(live: &Live) -> String {
    let getxattr = if cfg!(target_arch = "x86_64") { 191 } else { 8 };
    let places = "/workspace /newtop /topfile /toplink /share ~ /var /usr/moved /usr/local/bin/tool /usr/lib/prorl";
    let script = format!(
        "for place in {places}; do test -e $place || test -L $place || echo no $place; done
        find {places} -mindepth 1 -type d -printf '%p|%m|%U|%G|%T@\n' 2>/dev/null | sort | cksum
        find {places} -type d -path '*/deep*' -printf '%p|%m|%U|%G|%T@\n' 2>/dev/null | sort
        find {places} ! -type d -printf '%p|%y|%m|%U|%G|%T@|%l|%s|%n\n' 2>/dev/null | sort | head -200
        find {places} -type f -size -1000k -exec cksum {{}} + 2>/dev/null | sort | cksum
        ls -l /bin/umount /bin/renamed /usr/bin/prorl-tool /usr/bin/head 2>&1
        cat /etc/settings; stat -c '%a %u' /etc/settings; cat /workspace/written /workspace/soft /var/missing/in
        test /workspace/written -ef /workspace/deep/linked && echo one file
        command -v perl >/dev/null && PERL_BADLANG=0 perl -e 'my ($n, $v) = (\"user.task\", \"-\" x 9);
            print syscall({getxattr}, $ARGV[0], $n, $v, 9), $v' /workspace/written | cksum
        find /workspace -name '*sparse' -printf '%b blocks\n' | sort | head -c 3"
    );
    live.sh(&script).await
}

pub(super) async fn all_that_was_written_is_there_again(field: &Field) {
    let live = field.start(&[]).await;
    let mut script = format!("SETXATTR={}\n{CHANGES}", setxattr());
    if field.has_image() {
        script.push_str(IMAGE_CHANGES);
    } else if field.spec.fakeroot {
        script.push_str(ROOT_CHANGES);
    }
    assert_eq!(live.sh(&script).await, "");
    let before = seen(&live).await;
    assert!(before.contains("one file"), "{before}");
    let first = field.freeze(&live).await;
    assert!(first.record().entries > 20 && first.record().bytes < 1 << 20, "{:?}", first.record());
    let on_disk = outside(first.root());

    let live = field.start(&[&first]).await;
    assert_eq!(seen(&live).await, before);
    // All can be changed again.
    let script = "set -e; cd /workspace; echo again >> written; rm -r deep; mkdir deep; echo new > deep/new; chmod 700 shut
        rm -r shut soft; mkdir soft; rm sparse; echo 2 > /newtop/file; rm /topfile /toplink; rm -r /var/tmp/x; echo z > ~/note
        mkdir /newtop/below; mv sticky moved";
    assert_eq!(live.sh(script).await, "");
    let changed =
        live.sh("cat /workspace/linked /workspace/written; ls /workspace/deep /workspace/shut /topfile 2>&1").await;
    let after = seen(&live).await;
    assert_ne!(after, before);
    let second = field.freeze(&live).await;
    assert_eq!(second.record().below, [first.record().id.clone()]);
    assert_eq!(outside(first.root()), on_disk);

    let live = field.start(&[&first]).await;
    assert_eq!(seen(&live).await, before);
    live.shut().await;
    let live = field.start(&[&first, &second]).await;
    assert_eq!(seen(&live).await, after);
    let again =
        live.sh("cat /workspace/linked /workspace/written; ls /workspace/deep /workspace/shut /topfile 2>&1").await;
    assert_eq!(again, changed);
    live.shut().await;
    assert_eq!(outside(first.root()), on_disk);
}

pub(super) async fn many_start_from_one_and_none_sees_another(field: &Field) {
    let layer = field.layer("mkdir shared && echo one > shared/file && echo one > /newly").await;
    let on_disk = outside(layer.root());
    let mut starts = JoinSet::new();
    // A launcher takes some 20 times as long.
    let n_forks = if field.ground.name == "namespace" { 20 } else { 6 };
    for number in 0..n_forks {
        let spec = prorl_sandbox::SandboxSpec { layers: vec![layer.clone()], ..field.spec.clone() };
        let runtime = field.ground.runtime.clone();
        starts.spawn(async move {
            let live = Live::start_on(&*runtime, &spec).await;
            let script =
                format!("cat shared/* /newly; echo {number} > shared/file; cp shared/file shared/{number}; rm /newly");
            assert_eq!(live.sh(&script).await, "one\none");
            live
        });
    }
    for live in starts.join_all().await {
        let seen = live.sh("cat shared/* && ls shared | wc -l; ls /newly 2>/dev/null").await;
        let lines: Vec<_> = seen.lines().collect();
        assert!(lines.len() == 3 && lines[0] == lines[1] && lines[2] == "2", "{seen}");
        live.shut().await;
    }
    assert_eq!(outside(layer.root()), on_disk);
}

pub(super) async fn nothing_is_copied(field: &Field) {
    let layer = field.layer("head -c 9000000 /dev/urandom > large").await;
    let live = field.start(&[&layer]).await;
    let used: u64 = live.sh("df --output=used /workspace | tail -1").await.trim().parse().unwrap();
    // A fake root among programs of somebody else's has a few thousand folders, which take no bytes.
    assert!(used < 4096, "{used} KiB");
    assert_eq!(live.sh("wc -c < large").await, "9000000");
    live.shut().await;
}
