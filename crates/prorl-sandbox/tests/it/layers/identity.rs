//! What is a sandbox's own, whatever it starts from.

use prorl_sandbox::SandboxSpec;

use super::Field;

pub(super) async fn each_has_a_name_and_addresses_of_its_own(field: &Field) {
    let named = |name: &str| SandboxSpec { hostname: name.to_owned(), ..field.spec.clone() };
    let live = field.ground.start(&named("first")).await;
    // As an installer may, which writes nothing new.
    live.sh("chown -R $(id -u) /etc/host* 2>/dev/null; cat /etc/hosts > /tmp/h; cat /tmp/h > /etc/hosts").await;
    let layer = field.freeze(&live).await;
    let live = field.ground.start(&SandboxSpec { layers: vec![layer], ..named("second") }).await;
    let seen = live.sh("cat /etc/hostname /etc/hosts; cat /proc/sys/kernel/hostname; id -un; echo ~").await;
    assert!(!seen.contains("first") && seen.matches("second").count() == 4, "{seen}");
    live.shut().await;
}

pub(super) async fn settings_that_were_changed_stay(field: &Field) {
    let script = "echo 'ada:x:4711:4711::/:/bin/sh' >> /etc/passwd; echo 127.0.0.9 mine >> /etc/hosts
        rm /etc/resolv.conf; echo x > /etc/own; mkdir /etc/more; chmod 700 /workspace; rm -r ~; mkdir -p /opt/tool";
    let layer = field.layer(script).await;
    let look = "grep() { while read -r line; do case $line in *$1*) echo \"$line\";; esac; done < $2; }
        grep ada /etc/passwd; grep mine /etc/hosts; ls /etc/resolv.conf 2>/dev/null; cat /etc/own; stat -c %a /workspace
        ls -d /etc/more /opt/tool; id -un; test -s /etc/group && echo group; test -L /dev/fd && test -d /tmp && echo ok";
    let expected = "ada:x:4711:4711::/:/bin/sh\n127.0.0.9 mine\nx\n700\n/etc/more\n/opt/tool\n";
    let live = field.start(&[&layer]).await;
    let seen = live.sh(look).await;
    let user = if field.spec.fakeroot { "root" } else { "agent" };
    assert_eq!(seen, format!("{expected}{user}\ngroup\nok"));
    assert_eq!(live.sh("echo 'bob:x:4712:4712::/:/bin/sh' >> /etc/passwd; rm /etc/own").await, "");
    let second = field.freeze(&live).await;
    let live = field.start(&[&layer, &second]).await;
    let seen = live.sh("tail -n 2 /etc/passwd; ls /etc/own /etc/resolv.conf 2>/dev/null").await;
    assert_eq!(seen, "ada:x:4711:4711::/:/bin/sh\nbob:x:4712:4712::/:/bin/sh");
    live.shut().await;
}

/// What one has written is the other's: to both it belongs to the user.
pub(super) async fn users_and_fake_roots_start_from_each_others_layers(field: &Field) {
    let layer = field.layer("mkdir -p deep/x && echo one > deep/x/file && chmod 700 deep && rmdir /var/tmp").await;
    let other = SandboxSpec { fakeroot: !field.spec.fakeroot, layers: vec![layer.clone()], ..field.spec.clone() };
    let live = field.ground.start(&other).await;
    assert_eq!(
        live.sh("cat deep/x/file && echo two >> deep/x/file && stat -c %a deep; ls -d /var/tmp").await,
        "one\n700\n/var/tmp"
    );
    if other.fakeroot {
        // Its folders lie over those of the image that are somebody else's.
        assert_eq!(live.sh("mkdir /usr/share/more && echo lib > /usr/share/more/file && echo x > /usr/x").await, "");
    }
    let second = field.freeze(&live).await;
    for fakeroot in [false, true] {
        let layers = vec![layer.clone(), second.clone()];
        let live = field.ground.start(&SandboxSpec { fakeroot, layers, ..field.spec.clone() }).await;
        assert_eq!(live.sh("cat deep/x/file").await, "one\ntwo");
        if other.fakeroot {
            assert_eq!(live.sh("cat /usr/share/more/file /usr/x").await, "lib\nx");
        }
        live.shut().await;
    }
}
