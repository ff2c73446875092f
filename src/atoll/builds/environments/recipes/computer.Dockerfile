# `code` with a browser, a desktop without a screen, and Playwright for Python and Node.
FROM code

RUN export DEBIAN_FRONTEND=noninteractive \
    && apt-get update -q \
    && apt-get install -y -q --no-install-recommends \
        chromium dbus dbus-x11 ffmpeg openbox scrot tmux x11-utils x11vnc xauth xclip xdotool xvfb \
    && apt-get clean && rm -rf /var/lib/apt/lists/* /var/cache/debconf/*-old /var/log/apt /var/log/dpkg.log

COPY chromium-flags /etc/chromium.d/atoll
RUN rm /etc/chromium.d/dev-shm

ENV PLAYWRIGHT_BROWSERS_PATH=/opt/playwright PLAYWRIGHT_SKIP_BROWSER_GC=1 PLAYWRIGHT_SKIP_VALIDATE_HOST_REQUIREMENTS=1

# Playwright for Python brings a second Node.
COPY playwright-browsers /usr/local/bin/playwright-browsers
RUN pip install --no-cache-dir -q --progress-bar off playwright \
    && ln -sf /usr/local/bin/node "$(python3 -c 'import playwright; print(playwright.__path__[0])')/driver/node" \
    && npm install --global --no-audit --no-fund --cache /tmp/npm playwright && rm -rf /tmp/npm \
    && chmod 755 /usr/local/bin/playwright-browsers && playwright-browsers
