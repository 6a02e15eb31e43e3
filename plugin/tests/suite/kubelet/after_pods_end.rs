//! The files of dead pods are removed, and no others.

use std::fs;
use std::time::Duration;

use crate::kubelet::plugin::*;

#[tokio::test]
async fn pool_is_swept_only_when_unused() {
    let place = TestNode::with_kubelet().await;
    let plugin = place.start();
    place.all_there().await;
    let pool = place.path("dev/shm/shmesh/a");
    for name in ["p", "q"] {
        place.node.add_pod(pod(name, &[(POOL, 1)])).await;
    }
    fs::write(pool.join("link_shm"), vec![0; 100_000]).unwrap();
    plugin.shows("shmesh_plugin_pool_used_bytes{pool=\"a\"}", |bytes| bytes >= 100_000.0).await;
    // One is dead, the other may use what it left.
    place.node.delete_pod("p");
    plugin.shows("shmesh_plugin_allocated_units{resource=\"shmesh.io/a\"}", |units| units == 1.0).await;
    // Three times the grace: looks that would have swept.
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(pool.join("link_shm").exists());

    place.node.delete_pod("q");
    plugin.shows("shmesh_plugin_swept_files_total{pool=\"a\"}", |files| files == 1.0).await;
    assert!(!pool.join("link_shm").exists() && pool.exists());
    plugin.shows("shmesh_plugin_pool_used_bytes{pool=\"a\"}", |bytes| bytes == 0.0).await;
    // And the pool is as good as before.
    place.node.add_pod(pod("r", &[(POOL, 1)])).await;
    assert_eq!(place.node.holders(POOL).len(), 1);
}

#[tokio::test]
async fn unused_link_in_a_used_pool_is_removed() {
    let place = TestNode::with_kubelet().await;
    let plugin = place.start();
    place.all_there().await;
    let pool = place.path("dev/shm/shmesh/a");
    place.node.add_pod(pod("p", &[(POOL, 1)])).await;
    let options = shmesh::LinkOptions::new().dir(&pool);
    let config = |name: &str| shmesh_testing::config(name, "");
    let _used = options.create(&config("used")).unwrap();
    let dead = options.create(&config("dead")).unwrap();
    // A waiting message keeps the files when the last participant detaches.
    dead.send_inline(1, 0, b"").unwrap();
    drop(dead);
    plugin.shows("shmesh_plugin_swept_files_total{pool=\"a\"}", |files| files >= 2.0).await;
    until("all files of the link are removed", || {
        shmesh::inspect::names(&pool).unwrap().iter().map(|name| name.as_str()).eq(["used"])
    })
    .await;
    assert!(!pool.join("dead.lock").exists() && pool.join("used.lock").exists());
}

#[tokio::test]
#[ignore = "long: the plugin asks the kubelet four times in vain"]
async fn unavailable_pod_list_prevents_sweeping() {
    let place = TestNode::with_kubelet().await;
    let plugin = place.start();
    place.all_there().await;
    place.node.add_pod(pod("p", &[(POOL, 1)])).await;
    let file = place.path("dev/shm/shmesh/a/link_shm");
    fs::write(&file, "x").unwrap();
    place.node.kill_kubelet().await;
    plugin.shows("shmesh_plugin_pod_lists_failed_total", |count| count >= 4.0).await;
    assert!(file.exists());
    place.node.start_kubelet().await.unwrap();
    place.all_there().await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(file.exists(), "the pod lives");
}
